"""The sums of the requests since the last `take`."""

from msgspec.structs import replace

from picker.decisions.decision import ResponseTimes
from picker.errors import Code, RefusedError
from picker.planner.load_window import LoadWindow
from picker.planner.planner import NO_SUMS, Sums
from picker.types import Usage
from tests.support.picker.admin_scene import decision


def test_prompts_are_split_into_cached_and_fresh_tokens() -> None:
    window = LoadWindow()
    window.decided(decision("a", 64, 32))
    window.decided(decision("a", 64, None))
    taken = window.take()
    assert (taken.arrivals, taken.fresh, taken.cached) == (2, Sums.of((32, 64)), Sums.of((32, 0)))
    assert window.take() == LoadWindow()


def test_answers_that_pass_through_the_picker_count() -> None:
    window = LoadWindow()
    usage = Usage(prompt_tokens=64, completion_tokens=11)
    times = ResponseTimes(is_streaming=True, ttft_seconds=1.0)
    done = replace(
        decision("a", 64, 32), endpoint_key="default/a", usage=usage, response=times, seconds=3.0
    )
    window.finished(done)
    window.finished(replace(done, response=replace(times, is_streaming=False)))
    window.finished(replace(done, usage=None))
    taken = window.take()
    assert taken.output == Sums.of((11, 11))
    assert taken.gaps == Sums.of((0.2,))


def test_refused_requests_count_as_arrivals() -> None:
    """They are load that needs more workers."""
    window = LoadWindow()
    refused = replace(
        decision("a", 64, 32),
        endpoint_key=None,
        refusal=RefusedError(Code.RESOURCE_EXHAUSTED, "no endpoints"),
    )
    window.finished(refused)
    taken = window.take()
    assert (taken.arrivals, taken.fresh) == (1, NO_SUMS)
