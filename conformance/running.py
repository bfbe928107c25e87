"""Running cases one after the other, each to its one outcome."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from conformance.case import Case, NotApplicable, Provision, Strength, Violation
from conformance.report import Outcome, Result

S = TypeVar("S")


def chosen(cases: Sequence[Case[S]], patterns: Sequence[str]) -> list[Case[S]]:
    """The cases whose id matches one of the patterns; all where there is none."""
    if not patterns:
        return list(cases)
    return [case for case in cases if any(fnmatchcase(case.id, each) for each in patterns)]


async def outcomes(
    cases: Iterable[Case[S]],
    scene: S,
    provisions: frozenset[Provision],
    between: Callable[[], Awaitable[None]],
) -> AsyncIterator[Result]:
    """The result of each case. `between` puts the scene in order before each one that runs."""
    for case in cases:
        missing = sorted(need.value for need in case.needs - provisions)
        if missing:
            reason = f"not provided: {', '.join(missing)}"
            yield _result(case, Outcome.SKIPPED, reason, 0.0)
            continue
        began = time.monotonic()
        outcome, reason = await _outcome(case, scene, between)
        yield _result(case, outcome, reason, time.monotonic() - began)


async def _outcome(
    case: Case[S], scene: S, between: Callable[[], Awaitable[None]]
) -> tuple[Outcome, str]:
    broken = Outcome.FAILED if case.strength is Strength.MUST else Outcome.WARNED
    try:
        await between()
        async with asyncio.timeout(case.limit_seconds):
            await case.check(scene)
    except NotApplicable as reason:
        return Outcome.SKIPPED, str(reason)
    except Violation as violation:
        return broken, str(violation)
    except TimeoutError:
        return broken, f"not over within {case.limit_seconds:g} s"
    except Exception as error:  # noqa: BLE001 - whatever a picker makes of it, the others run
        return broken, f"unexpected {type(error).__name__}: {error}"
    return Outcome.PASSED, ""


def _result(case: Case[S], outcome: Outcome, reason: str, seconds: float) -> Result:
    return Result(case.id, case.strength, case.text, case.source, outcome, reason, seconds)
