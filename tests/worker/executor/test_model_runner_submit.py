"""Steps handed over before the tokens of the step before are known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.executor.interface import Executor, Ticket, execute
from worker.executor.model_runner import ModelRunner
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

VOCABULARY = 96
PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7], [90, 4], [8] * 30]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 5, "min_tokens": 4},
]
PENALTIES: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
]


def share(
    index: int, known: Sequence[int], wishes: dict[str, Any], ahead: int
) -> ScheduledSequence:
    params = SamplingParams(max_tokens=99, seed=index, **wishes)
    num_prompt, position = len(PROMPTS[index % 4]), len(known) + ahead
    spec = SampleSpec(
        params,
        position,
        (0, 7) if position - num_prompt < params.min_tokens else (),
        list(known) if params.needs_history else (),
        num_prompt,
    )
    start = 0 if position == num_prompt else position - 1
    tokens = list(known[start:])
    table = tuple(range(4 * index, 4 * index + -(-position // 16)))
    return ScheduledSequence(index, tokens, start, table, (spec,), takes_pending=ahead > 0)


def answers(executor: Executor, wishes: Sequence[dict[str, Any]], ahead: bool) -> list[list[Any]]:
    """With `ahead`, each step is handed over before the last one is collected."""
    known = [list(PROMPTS[index % 4]) for index in range(len(wishes))]
    drawn: list[list[Any]] = [[] for _ in wishes]
    tickets: list[Ticket] = []

    def take() -> None:
        result = tickets.pop(0).collect()
        assert not result.failed
        for index, draws in result.sampled.items():
            drawn[index] += draws
            known[index].append(draws[0].token_id)

    for step in range(20):
        shares = [share(i, known[i], wish, len(tickets)) for i, wish in enumerate(wishes)]
        if step % 2:  # rows and slots are not in the same order
            shares.reverse()
        tickets.append(executor.submit(SchedulerOutput(step, tuple(shares))))
        if not ahead or len(tickets) == 2:
            take()
    while tickets:
        take()
    return drawn


@pytest.mark.parametrize("wishes", [WISHES, WISHES + PENALTIES])
def test_a_step_handed_over_early_draws_what_it_would_have_drawn(
    tiny_executor: ModelRunner, wishes: list[dict[str, Any]]
) -> None:
    early, late = (answers(tiny_executor, wishes, ahead) for ahead in (True, False))
    assert early == late


def test_a_failed_sequence_spoils_no_submitted_step(tiny_executor: ModelRunner) -> None:
    expected = answers(tiny_executor, WISHES[:1], ahead=False)
    forbidden = {"temperature": 1.0, "allowed_token_ids": (0, 7), "min_tokens": 9}
    first = [share(0, PROMPTS[0], WISHES[0], 0), share(1, PROMPTS[1], forbidden, 0)]
    ticket = tiny_executor.submit(SchedulerOutput(0, tuple(first)))
    second = [share(1, PROMPTS[1], forbidden, 1), share(0, PROMPTS[0], WISHES[0], 1)]
    after = tiny_executor.submit(SchedulerOutput(1, tuple(second)))
    output = ticket.collect()
    assert list(output.failed) == [1]
    assert [*output.sampled[0], *after.collect().sampled[0]] == expected[0][:2]


class _NoReads(TorchDispatchMode):
    """Refuses what waits for the device to read a value."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert "_local_scalar_dense" not in name, f"{name} waits for the device"
        assert "nonzero" not in name, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read between submit and collect")

    with monkeypatch.context() as patch, _NoReads():
        for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def test_a_step_is_submitted_without_waiting_for_the_device(
    tiny_executor: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiny_executor._model is None or tiny_executor._model.kernels is None:
        pytest.skip("the native kernels are not built, or not for this CPU")
    tickets = []
    for ahead in (0, 1, 2):
        step = SchedulerOutput(
            ahead, tuple(share(i, PROMPTS[i], wish, ahead) for i, wish in enumerate(WISHES))
        )
        with no_reads(monkeypatch):
            tickets.append(tiny_executor.submit(step))
    assert [len(ticket.collect().sampled) for ticket in tickets] == [4, 4, 4]
    spec = SampleSpec(SamplingParams(max_tokens=99, temperature=0.9, top_p=0.8), 2)
    drafted = tuple(
        ScheduledSequence(i, [7, *[2] * 7], 1, [i % 16], (spec,), num_drafts=7) for i in range(40)
    )
    with no_reads(monkeypatch):
        ticket = tiny_executor.submit(SchedulerOutput(3, drafted))
    assert len(ticket.collect().sampled) == 40


def test_the_guard_against_reads_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Callable[[Any], Any]] = [int, float, bool, torch.nonzero]
    for read in [lambda x: x.tolist(), lambda x: x.item(), *reads]:
        with pytest.raises(AssertionError), no_reads(monkeypatch):
            read(torch.ones(1))


def test_a_step_without_sequences_only_copies(tiny_executor: ModelRunner) -> None:
    output = execute(tiny_executor, SchedulerOutput(0, (), ((0, 1),)))
    assert (output.sampled, output.failed) == ({}, {})
