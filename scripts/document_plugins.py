"""Keep the plugin types in docs/configuration.md what the plugin files say: checks, or with
`--write` writes, the text between the two marks.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from picker import plugins  # noqa: E402 (the repository's own, wherever we are started)
from picker.framework.registry import PluginType, Stability  # noqa: E402

DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- plugin types: written by scripts/document_plugins.py -->"
END = "<!-- end of the plugin types -->"
MARKS = {Stability.ALPHA: " (alpha)", Stability.BETA: "", Stability.DEPRECATED: " (deprecated)"}


def tables() -> str:
    """One table for each kind of plugin, by its folder."""
    parts = []
    for kind in pkgutil.iter_modules(plugins.__path__):
        modules = list(_modules(f"{plugins.__name__}.{kind.name}"))
        if modules and not kind.name.startswith("_"):
            title = kind.name.replace("_", " ").capitalize()
            head = "| type | what it does | parameters (defaults) |\n|---|---|---|\n"
            parts.append(f"#### {title}\n\n{head}{''.join(map(_row, modules))}")
    return "\n".join(parts)


def _modules(folder: str) -> Iterator[ModuleType]:
    package = importlib.import_module(folder)
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):  # those are helpers
            yield importlib.import_module(f"{folder}.{info.name}")


def _row(module: ModuleType) -> str:
    row: PluginType[Any] = module.PLUGIN
    names = ", ".join(f"`{name}`" for name in (row.name, *row.deprecated_aliases))
    cells = (names + MARKS[row.stability], _summary(module), _parameters(row))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _summary(module: ModuleType) -> str:
    """The first sentence of the file, without the type's name before it."""
    first = " ".join((module.__doc__ or "").split("\n\n")[0].split())
    return first.removeprefix(f"{module.PLUGIN.name}: ").split(". ")[0].rstrip(".")


def _parameters(row: PluginType[Any]) -> str:
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
