"""Keep the plugin types in docs/configuration.md what the plugin files say: checks, or with
`--write` writes, the text between the two marks.
"""

import sys
from pathlib import Path
from types import ModuleType

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# The repository's own, wherever this is started.
from picker.config.catalog import PACKAGES, modules_of  # noqa: E402
from picker.framework.registry import PluginType, Stability  # noqa: E402
from scripts.wrap_prose import wrapped  # noqa: E402

DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- plugin types: written by scripts/document_plugins.py -->"
END = "<!-- end of the plugin types -->"
# Defaults that the page gives once.
COMMON = {
    "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
    "inFlightLoadProducerName": "inflight-load-producer",
    "latencyPredictionInfoProducerName": "predicted-latency-producer",
}
MARKS = {Stability.ALPHA: " (alpha)", Stability.BETA: "", Stability.DEPRECATED: " (deprecated)"}


def lists() -> str:
    """One list for each kind of plugin, one for each file of several kinds, one for the shelf."""
    titled: dict[str, list[str]] = {}
    known: dict[str, list[str]] = {}
    for package in PACKAGES:
        for module, rows in modules_of(package):
            inner = module.__name__.removeprefix(f"{package}.").partition(".")[0]
            title = inner if package == PACKAGES[0] else package.rpartition(".")[2]
            titled.setdefault(title, []).extend(_item(module, row, known) for row in rows)
    heads = {title: title.replace("_", " ").capitalize() for title in titled}
    return wrapped("\n".join(f"#### {heads[one]}\n\n{''.join(titled[one])}" for one in titled))


def _item(module: ModuleType, row: PluginType, known: dict[str, list[str]]) -> str:
    names = ", ".join(f"`{name}`" for name in (row.name, *row.deprecated_aliases))
    parameters = _parameters(row)
    known[row.name] = parameters
    ending = f"; {_shown(row.name, known)}" if parameters else ""
    return f"- {names}{MARKS[row.stability]}: {_summary(module, row)}{ending}\n"


def _shown(name: str, known: dict[str, list[str]]) -> str:
    """The parameters; those that a type before it has are given by its name."""
    here = known[name]
    for other, there in known.items():
        changed = [one for one in here if one not in there]
        has_all = {one.split()[0] for one in there} <= {one.split()[0] for one in here}
        if has_all and other != name and len(there) > 1 and 2 * len(changed) < len(there):
            but = f", but {', '.join(changed)}" if changed else ""
            return f"parameters of `{other}`{but}"
    return ", ".join(here)


def _summary(module: ModuleType, row: PluginType) -> str:
    """The first sentence of the type's paragraph, which begins with its name, else of the file."""
    paragraphs = (module.__doc__ or "").split("\n\n")
    named = [one for one in paragraphs if one.startswith(f"{row.name}: ")]
    first = " ".join((named or paragraphs)[0].split())
    return first.removeprefix(f"{row.name}: ").split(". ")[0].rstrip(".")


def _parameters(row: PluginType) -> list[str]:
    parts = []
    for field in msgspec.structs.fields(row.parameters):
        shown = " (required)" if field.required else _default(field)
        if shown == f" ({COMMON.get(field.encode_name)})":
            shown = ""
        parts.append(f"`{field.encode_name}`{shown}")
    return parts


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if value is msgspec.NODEFAULT or value is None or value in ("", ()):
        return ""
    try:
        text = msgspec.json.encode(value).decode()
    except TypeError:
        return ""
    return "" if text.startswith(("{", "[")) else f" ({text.strip(chr(34))})"


def main() -> int:
    """Compare, or write; 1 when the document is not what it should be."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n\n{lists()}\n{END}{after}"
    if wanted == document:
        return 0
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
        return 0
    print("docs/configuration.md lags behind the plugins; run scripts/document_plugins.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
