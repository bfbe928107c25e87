"""Open sequences: aborts by id, and the count of waiting tokens."""

from typing import Any

import pytest

from worker.api.generate.admission import Admission
from worker.api.generate.open_sequences import OpenSequences, response_of
from worker.engine.messages import AddRequest
from worker.metrics.page import WorkerMetrics
from worker.types import SamplingParams


def request(request_id: str, num_tokens: int = 5, branches: tuple[str, ...] = ()) -> AddRequest:
    ids = list(range(num_tokens))
    return AddRequest(request_id, ids, SamplingParams(4), 0.0, branch_ids=list(branches))


@pytest.fixture
def subject(bench: Any) -> tuple[OpenSequences, Admission]:
    bench.engine.steps = bench.engine.steps[:1]
    metrics = WorkerMetrics("m", 64, 1.0)
    admission = Admission(bench.engine, metrics, max_num_seqs=4, max_num_queued_reqs=None)
    return OpenSequences(bench.engine, admission), admission


@pytest.mark.parametrize(
    ("asked", "stopped"),
    [
        ("cmpl-a", ["cmpl-a-0-1f", "1_cmpl-a-0-1f", "cmpl-a-1-2f"]),
        ("a", ["cmpl-a-0-1f", "1_cmpl-a-0-1f", "cmpl-a-1-2f"]),
        ("a-0", ["cmpl-a-0-0-3f"]),
        ("b", ["4_cmpl-b-0-5f"]),
        ("cmpl-b", ["4_cmpl-b-0-5f"]),
        ("cmpl-a-1-2f", ["cmpl-a-1-2f"]),
        ("1_cmpl-a-0-1f", ["1_cmpl-a-0-1f"]),
        ("cmpl", []),
        ("", []),
    ],
)
async def test_aborts_reach_every_sequence_of_a_response(
    subject: Any, bench: Any, asked: str, stopped: list[str]
) -> None:
    engine, _ = subject
    engine.open(request("cmpl-a-0-1f", branches=("1_cmpl-a-0-1f",)))
    engine.open(request("cmpl-a-1-2f"))
    engine.open(request("cmpl-a-0-0-3f"))
    engine.open(request("4_cmpl-b-0-5f"))
    engine.abort([asked])
    assert bench.engine.aborted == stopped


async def test_closed_sequences_leave_the_list(subject: Any, bench: Any) -> None:
    engine, _ = subject
    (stream,) = engine.open(request("cmpl-a-0-1f"))
    stream.close()
    bench.engine.aborted.clear()
    engine.abort(["cmpl-a"])
    assert bench.engine.aborted == []


async def test_prompts_wait_until_their_first_output(subject: Any) -> None:
    engine, admission = subject
    first, branch = engine.open(request("cmpl-a-0-1f", 5, ("1_cmpl-a-0-1f",)))
    (second,) = engine.open(request("cmpl-b-0-1f", 7))
    assert admission.num_queued_tokens == 12
    await branch.next()
    assert admission.num_queued_tokens == 7
    for stream in (first, branch, second):
        stream.close()
    assert admission.num_queued_tokens == 0


def test_a_response_is_found_in_its_requests_ids() -> None:
    for prefix in ("", "1_", "12_"):
        assert response_of(f"{prefix}chatcmpl-my-own-id-3-0badcafe") == "chatcmpl-my-own-id"


class Compared(str):
    """An id that counts how often it is compared with another."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


async def test_many_ids_cost_one_pass_over_open_sequences(subject: Any, bench: Any) -> None:
    engine, _ = subject
    for n in range(50):
        engine.open(request(f"cmpl-{n}-0-1f"))
    Compared.comparisons = 0
    engine.abort([Compared(f"cmpl-x{n}") for n in range(100)] + ["cmpl-7", "8"])
    assert bench.engine.aborted == ["cmpl-7-0-1f", "cmpl-8-0-1f"]
    assert Compared.comparisons < 100  # where two hashes happen to share a slot; not 100 × 50 × 3
