"""Engines that `speculation.py` measures, in process and built as a worker builds them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, EngineStats
from worker.executor.interface import Executor
from worker.types import SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What one run asks an engine for."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class Outcome:
    """What came of a job on one engine. Decoding is what happens after every request has its first
    token, so that prompts are not in it.
    """

    answers: list[tuple[int, ...]]
    whole_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0  # of all threads
    num_decoded: int = 0  # tokens, in those seconds
    num_shares: int = 0  # sequences' shares of steps, in those seconds
    num_steps: int = 0
    num_runs: int = 0  # shares with drafts
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def seconds_per_token(self) -> float:
        """Decoding seconds for each token."""
        return self.decode_seconds / max(self.num_decoded, 1)

    @property
    def cpu_seconds_per_token(self) -> float:
        """The same in the time that processors were at it."""
        return self.decode_cpu_seconds / max(self.num_decoded, 1)


class Lent:
    """Implements `Executor`: another one, which outlives the engine that it is lent to."""

    def __init__(self, executor: Executor) -> None:
        self.execute = executor.execute

    def sleep(self, level: int) -> None:
        """Not used here."""

    def wake(self, tags: frozenset[str]) -> None:
        """Not used here."""

    def shutdown(self) -> None:
        """The owner does that."""


def engine_config(
    path: Path,
    dtype: str,
    num_threads: int | None,
    eos_token_ids: tuple[int, ...],
    speculative: SpeculativeConfig | None,
) -> EngineConfig:
    """A worker's defaults but for the prefix cache, which would let later rounds skip prompts."""
    limits = SchedulerConfig(4096, MAX_BATCH, MAX_MODEL_LEN)
    return EngineConfig(
        "torch",
        str(path),
        dtype,
        block_size=BLOCK_SIZE,
        num_blocks_override=MAX_BATCH * MAX_MODEL_LEN // BLOCK_SIZE // 4,
        enable_prefix_caching=False,
        num_threads=num_threads,
        scheduler=limits,
        eos_token_ids=eos_token_ids,
        speculative=speculative,
    )


class Subject:
    """One engine, which lives as long as the benchmark: what it learns, it keeps."""

    def __init__(self, name: str, core: EngineCore) -> None:
        self.name = name
        self._core = core
        self._count = 0
        self._stats = EngineStats()

    def run(self, job: Sequence[Request], tenant: str) -> Outcome:
        """Ask for everything at once and wait for the last answer.

        Outputs of another `tenant` are nothing that drafts are made from.
        """
        names = {f"{self._count}-{index}": index for index in range(len(job))}
        self._count += 1
        for name, index in names.items():
            prompt, params = list(job[index].prompt), job[index].params
            self._core.add(AddRequest(name, prompt, params, 0.0, tenant=tenant))
        before = self._stats
        answers: list[list[int]] = [[] for _ in job]
        outcome = Outcome([])
        started = time.perf_counter()
        decoding_since: tuple[float, float] | None = None
        while self._core.has_work:
            step = self._core.step()
            if step is None:
                continue
            self._stats = step.stats
            for output in step.outputs:
                assert output.error is None, output.error
                answers[names[output.request_id]].extend(output.token_ids)
                if decoding_since is not None and output.token_ids:
                    outcome.num_decoded += len(output.token_ids)
                    outcome.num_shares += 1
            if decoding_since is None and all(answers):
                decoding_since = time.perf_counter(), time.process_time()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        outcome.answers = [tuple(answer) for answer in answers]
        outcome.whole_seconds = ended - started
        since, since_cpu = decoding_since or (ended, ended_cpu)
        outcome.decode_seconds = ended - since
        outcome.decode_cpu_seconds = ended_cpu - since_cpu
        self._count_drafts(outcome, before)
        return outcome

    def shutdown(self) -> None:
        """Give its memory back."""
        self._core.shutdown()

    def _count_drafts(self, outcome: Outcome, before: EngineStats) -> None:
        after = self._stats
        outcome.num_steps = after.num_steps - before.num_steps
        outcome.num_runs = after.num_drafts - before.num_drafts
        outcome.num_draft_tokens = after.num_draft_tokens - before.num_draft_tokens
        outcome.num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        earlier = [*before.num_accepted_by_position]
        earlier += [0] * (len(after.num_accepted_by_position) - len(earlier))
        outcome.accepted_by_position = [
            now - then for now, then in zip(after.num_accepted_by_position, earlier, strict=True)
        ]
