"""A package of logits processors, installed in a folder of the module search path."""

from pathlib import Path

_MODULE = '''
class Forbid:
    def __init__(self, forbidden: list[int]) -> None:
        if not forbidden:
            raise ValueError("forbidden must not be empty")
        self.forbidden = [int(token) for token in forbidden]

    def process(self, output, row):
        row[self.forbidden] = float("-inf")
        return row


class Cycle:
    def __init__(self, cycle: list[int], offset: int = 0) -> None:
        self.cycle, self.offset = cycle, offset

    def process(self, output, row):
        token = self.cycle[(len(output) + self.offset) % len(self.cycle)]
        forced = row.new_full(row.shape, float("-inf"))
        forced[token] = 0.0
        return forced


class Fresh:
    """Draws none of the last `window` tokens; scales the other logits."""

    def __init__(self, window: int, scale: float = 1.0) -> None:
        self.window, self.scale = window, scale

    def process(self, output, row):
        recent = list(output[-self.window :])
        row *= self.scale
        row[recent] = float("-inf")
        return row


class Broken:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def process(self, output, row):
        if len(output) < 2:
            return row
        if self.fault == "raises":
            raise RuntimeError("a processor that does not work")
        return row[:1] if self.fault == "short" else row * float("nan")


class Anything:
    def __init__(self, **arguments) -> None:
        pass

    def process(self, output, row):
        return row


class Unable:
    def __init__(self, able: bool) -> None:
        pass
'''
_NAMES = ("Forbid", "Cycle", "Fresh", "Broken", "Anything", "Unable")


def install_processors(folder: Path) -> None:
    """Entry points `forbid`, `cycle`, `fresh` and `broken`, and some that cannot be loaded."""
    (folder / "processors_of_a_test.py").write_text(_MODULE)
    info = folder / "processors_of_a_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: processors-of-a-test\n")
    points = [f"{name.lower()} = processors_of_a_test:{name}" for name in _NAMES]
    points.append("missing = processors_of_a_test:Missing")
    text = "\n".join(("[pointsman.logits_processors]", *points))
    (info / "entry_points.txt").write_text(text)
