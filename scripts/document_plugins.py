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

DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- plugin types: written by scripts/document_plugins.py -->"
END = "<!-- end of the plugin types -->"
MARKS = {Stability.ALPHA: " (alpha)", Stability.BETA: "", Stability.DEPRECATED: " (deprecated)"}


def tables() -> str:
    """One table for each kind of plugin, one for each file of several kinds, one for the shelf."""
    titled: dict[str, list[str]] = {}
    for package in PACKAGES:
        for module, rows in modules_of(package):
            inner = module.__name__.removeprefix(f"{package}.").partition(".")[0]
            title = inner if package == PACKAGES[0] else package.rpartition(".")[2]
            titled.setdefault(title, []).extend(_row(module, row) for row in rows)
    head = "| type | what it does | parameters (defaults) |\n|---|---|---|\n"
    parts = []
    for title, lines in titled.items():
        parts.append(f"#### {title.replace('_', ' ').capitalize()}\n\n{head}{''.join(lines)}")
    return "\n".join(parts)


def _row(module: ModuleType, row: PluginType) -> str:
    names = ", ".join(f"`{name}`" for name in (row.name, *row.deprecated_aliases))
    cells = (names + MARKS[row.stability], _summary(module, row), _parameters(row))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _summary(module: ModuleType, row: PluginType) -> str:
    """The first sentence of the type's paragraph, which begins with its name, else of the file."""
    paragraphs = (module.__doc__ or "").split("\n\n")
    named = [one for one in paragraphs if one.startswith(f"{row.name}: ")]
    first = " ".join((named or paragraphs)[0].split())
    return first.removeprefix(f"{row.name}: ").split(". ")[0].rstrip(".")


def _parameters(row: PluginType) -> str:
    parts = []
    for field in msgspec.structs.fields(row.parameters):
        shown = "" if field.required else _default(field)
        parts.append(f"`{field.encode_name}`{shown}{', required' if field.required else ''}")
    return "; ".join(parts)


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
    wanted = f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"
    if wanted == document:
        return 0
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
        return 0
    print("docs/configuration.md lags behind the plugins; run scripts/document_plugins.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
