"""Taps that hold back some of a response, change nothing, and may fail at any call."""

from hypothesis import strategies as st

from picker.types import BodyReport, Metadata, ResponseHead


class TapError(Exception): ...


class HoldingTap:
    """It never fails at the end, where the bytes it still holds would be unknown."""

    def __init__(self, holds: int, fails_at: int | None) -> None:
        self._holds = holds
        self._fails_at = fails_at
        self._held = b""
        self._calls = 0

    def _fails(self) -> bool:
        self._calls += 1
        return self._calls == self._fails_at

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        if self._fails():
            raise TapError
        return (("x-tapped", "yes"),)

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        if self._fails():
            raise TapError
        self._held += data
        keep = 0 if is_last else self._holds
        cut = max(0, len(self._held) - keep)
        out, self._held = self._held[:cut], self._held[cut:]
        return out, ({"envoy.lb": {"x-cost": len(out)}} if is_last else {})

    def report(self, report: BodyReport) -> None:
        if self._fails():
            raise TapError

    def end(self) -> bytes:
        out, self._held = self._held, b""
        return out


def taps() -> st.SearchStrategy[HoldingTap]:
    return st.builds(HoldingTap, st.sampled_from([0, 1, 5, 100_000]), st.none() | st.integers(1, 4))
