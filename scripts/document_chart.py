"""Keep the values in the chart's README what values.yaml and its comments say: checks, or with
`--write` writes, the text between the two marks.

A comment describes the key below it, and the keys that follow that one without a comment.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "pointsman"
README = CHART / "README.md"
BEGIN = "<!-- values: written by scripts/document_chart.py -->"
END = "<!-- end of the values -->"
_LONGEST_DEFAULT = 60


def table() -> str:
    """One row for each value, in the order of the file."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError("values.yaml is no mapping")
    rows = _rows(root, text.splitlines(), "")
    return "| value | default | meaning |\n|---|---|---|\n" + "".join(rows)


def _rows(node: yaml.MappingNode, lines: list[str], under: str) -> Iterator[str]:
    for key, value in node.value:
        path = f"{under}{key.value}"
        meaning = _comment_above(lines, key.start_mark.line, key.start_mark.column)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            if meaning:
                yield _row(path, "", meaning)
            yield from _rows(value, lines, f"{path}.")
        else:
            yield _row(path, _default(value), meaning)


def _comment_above(lines: list[str], line: int, column: int) -> str:
    """Return the comment lines above a key, at its own indentation."""
    first = line
    head = f"{' ' * column}# "
    while first and lines[first - 1].startswith(head):
        first -= 1
    return " ".join(one.removeprefix(head) for one in lines[first:line])


def _default(node: yaml.Node) -> str:
    """Return a default in one line, unless it is long."""
    value = yaml.safe_load(yaml.serialize(node))
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    text = text.removesuffix("...\n").strip()
    return f"`{text}`" if len(text) <= _LONGEST_DEFAULT else "see values.yaml"


def _row(path: str, default: str, meaning: str) -> str:
    return f"| `{path}` | {default} | {meaning.replace('|', chr(92) + '|')} |\n"


def main() -> int:
    """Compare, or write; 1 when the document is not what it should be."""
    document = README.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n\n{table()}\n{END}{after}"
    if wanted == document:
        return 0
    if sys.argv[1:] == ["--write"]:
        README.write_text(wanted, encoding="utf-8")
        return 0
    print(f"{README} is not what values.yaml says: run {__file__} --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
