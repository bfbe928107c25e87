"""Every case has one outcome, whatever happens in it."""

import asyncio
from collections.abc import Callable

import pytest

from conformance.case import NotApplicable, Provision, Strength, Violation, case, expect
from conformance.report import Outcome
from conformance.running import chosen, outcomes


@case("fine", "nowhere")
async def fine(scene: list[str]) -> None:
    """A rule
    of two lines.
    """
    scene.append("fine")


@case("broken", "nowhere")
async def is_broken(scene: list[str]) -> None:
    expect(False, "it is so")


@case("advised", "nowhere", strength=Strength.SHOULD)
async def advised(scene: list[str]) -> None:
    raise Violation("not so good")


@case("unclear", "nowhere")
async def unclear(scene: list[str]) -> None:
    raise NotApplicable("who knows")


@case("odd", "nowhere")
async def odd(scene: list[str]) -> None:
    raise ValueError("odd")


@case("endless", "nowhere", limit_seconds=0.01)
async def endless(scene: list[str]) -> None:
    await asyncio.Event().wait()


@case("needy", "nowhere", Provision.TLS, Provision.HEALTH)
async def needy(scene: list[str]) -> None:
    scene.append("never")


CASES = (fine, is_broken, advised, unclear, odd, endless, needy)


def in_order(orders: list[int]) -> Callable[[], object]:
    """Something to do between cases; counts how often it is asked."""

    async def between() -> None:
        orders.append(1)

    return between


async def test_every_case_ends_in_one_way() -> None:
    """Each result has its outcome and reason; an endless or broken case stops no other."""
    scene: list[str] = []
    orders: list[int] = []
    given = frozenset({Provision.HEALTH})
    found = [one async for one in outcomes(CASES, scene, given, in_order(orders))]  # type: ignore[arg-type]
    assert [(one.case, one.outcome, one.reason) for one in found] == [
        ("fine", Outcome.PASSED, ""),
        ("broken", Outcome.FAILED, "it is so"),
        ("advised", Outcome.WARNED, "not so good"),
        ("unclear", Outcome.SKIPPED, "who knows"),
        ("odd", Outcome.FAILED, "unexpected ValueError: odd"),
        ("endless", Outcome.FAILED, "not over within 0.01 s"),
        ("needy", Outcome.SKIPPED, "not provided: tls"),
    ]
    assert scene == ["fine"]
    assert len(orders) == 6
    assert found[0].text == "A rule of two lines."


async def test_a_scene_that_cannot_be_put_in_order_fails_the_case() -> None:
    """A picker that does not come back is a finding, and no reason to stop."""

    async def between() -> None:
        raise Violation("it does not come back")

    found = [one async for one in outcomes([fine], [], frozenset(), between)]
    assert [(one.outcome, one.reason) for one in found] == [
        (Outcome.FAILED, "it does not come back")
    ]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], [one.id for one in CASES]),
        (["fine"], ["fine"]),
        (["*e*y", "odd"], ["odd", "needy"]),
        (["none"], []),
    ],
)
def test_cases_are_chosen_by_patterns(patterns: list[str], expected: list[str]) -> None:
    assert [one.id for one in chosen(CASES, patterns)] == expected
