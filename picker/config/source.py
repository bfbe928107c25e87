"""Where a configuration came from: its name and the YAML nodes, which alone know positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A document by the name that messages call it (a file, a flag)."""

    name: str
    root: yaml.Node = field(repr=False)

    def position(self, path: Path) -> tuple[int, int]:
        """Line and column, from one, of the deepest step of `path` that exists: of a key, else of
        a list element.
        """
        mark, _ = self._follow(path)
        return mark.line + 1, mark.column + 1

    def line_of(self, path: Path) -> int | None:
        """The line, from one, where all of `path` is written; None when it is not."""
        mark, is_all = self._follow(path)
        return mark.line + 1 if is_all else None

    def _follow(self, path: Path) -> tuple[yaml.Mark, bool]:
        node, mark = self.root, self.root.start_mark
        for step in path:
            if isinstance(node, yaml.MappingNode):
                # The last one counts: those before it were merged and overridden.
                pair = next((pair for pair in reversed(node.value) if pair[0].value == step), None)
                if pair is None:
                    return mark, False
                mark, node = pair[0].start_mark, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                if step >= len(node.value):
                    return mark, False
                node = node.value[step]
                mark = node.start_mark
            else:
                return mark, False
        return mark, True


def dotted(path: Path) -> str:
    """`plugins[2].parameters.blockSize`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).lstrip(".")
