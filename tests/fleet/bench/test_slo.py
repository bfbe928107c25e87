"""Objectives as text, and the requests that meet them."""

import pytest

from fleet.bench.slo import Slo, read_bounds


def test_bounds_are_read_with_their_units() -> None:
    bounds = read_bounds("ttft<1.5s, itl<=50ms,e2e_p95<900us")
    assert [(b.metric, b.quantile, b.sign, b.seconds) for b in bounds] == [
        ("ttft", None, "<", 1.5),
        ("itl", None, "<=", pytest.approx(0.05)),
        ("e2e", "p95", "<", pytest.approx(0.0009)),
    ]


@pytest.mark.parametrize("text", ["", "ttft<1", "ttfb<1s", "ttft>1s", "ttft_p4<1s", "ttft<0s", ","])
def test_an_invalid_bound_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="takes bounds such as"):
        read_bounds(text)


@pytest.mark.parametrize(
    ("ttft", "itl", "is_within"),
    [(0.99, 0.05, True), (1.0, 0.01, False), (0.5, 0.06, False), (0.5, None, True)],
)
def test_a_request_is_within_all_bounds_of_requests(
    ttft: float, itl: float | None, is_within: bool
) -> None:
    slo = Slo(read_bounds("ttft<1s,itl<=50ms,e2e_p95<1ms"))
    assert slo.admits({"ttft": ttft, "itl": itl, "e2e": 9.0}) is is_within
