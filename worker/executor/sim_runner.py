"""An executor without a model: it takes the time a step would take and draws repeatable tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from worker.config import SimConfig
from worker.types import Draw, ModelOutput, SampleSpec, SchedulerOutput

_MASK = (1 << 64) - 1


def _scramble(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014): each input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class SimExecutor:
    """Answers steps from the latency model of `SimConfig`; implements `Executor`.

    `wait` lets the given seconds pass (sleep in a process, advance a virtual clock in a
    simulation); it is not called when there are none. A token is a pure function of the token
    before it, its position, the request's seed (greedy requests have none) and the simulator's
    seed, so a request's answer depends neither on the batch nor on chunking.
    """

    def __init__(self, config: SimConfig, wait: Callable[[float], None]) -> None:
        self._config = config
        self._wait = wait

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Wait as long as the step takes, then give every sequence that samples its token."""
        seconds = self.step_seconds(step)
        if seconds > 0:
            self._wait(seconds)
        return ModelOutput(
            {
                sequence.seq_id: tuple(
                    Draw(self._draw(sequence.token_ids[-1], sample)) for sample in sequence.samples
                )
                for sequence in step.sequences
                if sequence.samples
            }
        )

    def step_seconds(self, step: SchedulerOutput) -> float:
        """How long the step takes. A sequence that runs one token and samples is decoding."""
        config = self._config
        num_prefill_tokens = num_decoding = 0
        for sequence in step.sequences:
            num_tokens = len(sequence.token_ids)
            if num_tokens == 1 and sequence.samples:
                num_decoding += 1
            else:
                num_prefill_tokens += num_tokens
        seconds = config.step_overhead_seconds
        seconds += num_prefill_tokens / config.prefill_tokens_per_second
        if num_decoding:
            seconds += config.decode_base_seconds
            seconds += num_decoding * config.decode_per_sequence_seconds
        return seconds * config.time_scale

    def sleep(self, level: int) -> None:
        """There is no memory to give back."""

    def wake(self, tags: frozenset[str]) -> None:
        """Nothing was given back."""

    def shutdown(self) -> None:
        """There is no device to give back."""

    def _draw(self, last_token: int, sample: SampleSpec) -> int:
        config = self._config
        seed = sample.params.seed if sample.params.temperature > 0 else 0
        state = _scramble(config.seed + seed)
        state = _scramble(state + (sample.position << 32) + last_token)
        end = config.end_token_id
        may_end = end is not None and end not in sample.banned_ids
        if may_end and _scramble(state + 1) < _MASK / config.mean_output_tokens:
            return cast(int, end)
        return config.first_word_id + state % config.num_words
