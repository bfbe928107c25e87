"""The duration of a simulated step: four models, each a pure function of the step.

Every sequence of a step gets its token when the step ends. Models of whole steps (linear, dynamo)
fit that directly. Models of single requests (constant, llm-d) derive one duration for the step:

    step = max(longest of the prompts' times, mean of the decoding sequences' times)

The token times of a prompt add up over its chunks; its one-time costs fall due with the last one.
Noise is a function of (simulator seed, request seed, position): the same in any batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from worker.sim.config import SimConfig
from worker.sim.random import bits, normal, stream
from worker.types import SampleSpec, ScheduledSequence, SchedulerOutput

MAX_STD_SHARE = 0.3  # of the mean, as in the llm-d inference simulator
_LATENCY = 1  # purpose of a stream


@dataclass(frozen=True, slots=True)
class Capacity:
    max_num_seqs: int = 128
    kv_tokens: int = 65_536


class LatencyModel(Protocol):
    def seconds(self, step: SchedulerOutput) -> float:
        """Return the duration of a step, before `time_scale`."""


def is_decoding(sequence: ScheduledSequence) -> bool:
    """Return True if a sequence runs one known token (and drafts), and draws no first token."""
    if len(sequence.token_ids) - sequence.num_drafts != 1 or not sequence.samples:
        return False
    sample = sequence.samples[0]
    return sample.position != sample.num_prompt


class LinearModel:
    """seconds = step_overhead + Σ over prompt chunks and drafts (tokens / prefill_tokens_per_second
    + prefill_context · Σ over their tokens of the context, itself included) + when anything
    decodes: decode_base + Σ over decoding sequences (decode_per_sequence + kv_read · context).
    """

    def __init__(self, config: SimConfig, capacity: Capacity) -> None:
        self._config = config

    def seconds(self, step: SchedulerOutput) -> float:
        config = self._config
        num_prefill = num_pairs = num_decoding = num_read = 0
        for sequence in step.sequences:
            count, start = len(sequence.token_ids), sequence.start
            if is_decoding(sequence):
                num_decoding += 1
                num_read += start + count  # once per sequence, not per row
                count, start = sequence.num_drafts, start + 1
            num_prefill += count
            num_pairs += count * start + count * (count + 1) // 2
        seconds = config.step_overhead_seconds
        seconds += num_prefill / config.prefill_tokens_per_second
        seconds += num_pairs * config.prefill_context_seconds
        if num_decoding:
            seconds += config.decode_base_seconds
            seconds += num_decoding * config.decode_per_sequence_seconds
            seconds += num_read * config.kv_read_seconds
        return seconds


class RequestModel:
    """The models of single requests, constant and llm-d; the formulas are in docs/simulator.md.

    Each time is drawn from N(mean, std), clamped to [0.3, 1.7] · mean, which keeps the mean.
    """

    def __init__(self, config: SimConfig, capacity: Capacity) -> None:
        self._config = config
        is_llm_d = config.latency_model == "llm-d"
        first = config.time_to_first_token_seconds, config.time_to_first_token_std_seconds
        self._by_token = is_llm_d and not any(first)
        slots = capacity.max_num_seqs - 1
        self._slowdown = (config.time_factor_under_load - 1) / slots if is_llm_d and slots else 0.0

    def seconds(self, step: SchedulerOutput) -> float:
        config = self._config
        factor = 1 + self._slowdown * (len(step.sequences) - 1)
        per_draft = config.prefill_per_token_seconds * factor if self._by_token else 0.0
        mean, std = (
            config.inter_token_latency_seconds * factor,
            config.inter_token_latency_std_seconds,
        )
        longest = total = 0.0
        num_decoding = 0
        for sequence in step.sequences:
            if is_decoding(sequence):
                num_decoding += 1
                total += self._sample(mean, std, sequence.samples[0]) if std else mean
                total += sequence.num_drafts * per_draft
            else:
                longest = max(longest, self._prefill(sequence, factor))
        return max(longest, total / num_decoding) if num_decoding else longest

    def _prefill(self, sequence: ScheduledSequence, factor: float) -> float:
        config = self._config
        if self._by_token:
            mean = len(sequence.token_ids) * config.prefill_per_token_seconds
            if sequence.samples:
                mean += config.prefill_overhead_seconds
            # The mean depends on the prompt, so the std can only be capped here.
            std = min(config.prefill_std_seconds, MAX_STD_SHARE * mean)
        else:
            mean = config.time_to_first_token_seconds if sequence.samples else 0.0
            std = config.time_to_first_token_std_seconds
        if not sequence.samples:
            return mean * factor
        return self._sample(mean * factor, std, sequence.samples[0])

    def _sample(self, mean: float, std: float, sample: SampleSpec) -> float:
        if not std:
            return mean
        base = stream(self._config.seed, sample.params.seed, _LATENCY)
        drawn = mean + std * normal(bits(base, sample.position))
        return min(max(drawn, 0.3 * mean), 1.7 * mean)


class DynamoModel:
    """The polynomials of Dynamo's mocker, in milliseconds; see docs/simulator.md."""

    def __init__(self, config: SimConfig, capacity: Capacity) -> None:
        self._config = config
        self._kv_tokens = capacity.kv_tokens

    def seconds(self, step: SchedulerOutput) -> float:
        num_prefill = num_drafts = num_active = 0
        for sequence in step.sequences:
            if is_decoding(sequence):
                num_active += sequence.start + len(sequence.token_ids)
                num_drafts += sequence.num_drafts
            else:
                num_prefill += len(sequence.token_ids)
        rows = num_prefill + num_drafts
        milliseconds = (4.209989e-7 * rows + 1.518344e-2) * rows
        if num_prefill:
            milliseconds += 16.50142
        if num_active:
            usage = min(num_active / self._kv_tokens, 1.0)
            decode = max(1.0, (-25.74 * usage + 54.01) * usage + 5.74)
            milliseconds += decode / self._config.decode_speedup_ratio
        return milliseconds / self._config.speedup_ratio / 1e3


MODELS: Mapping[str, Callable[[SimConfig, Capacity], LatencyModel]] = {
    "linear": LinearModel,
    "constant": RequestModel,
    "llm-d": RequestModel,
    "dynamo": DynamoModel,
}


def build_model(config: SimConfig, capacity: Capacity) -> LatencyModel:
    return MODELS[config.latency_model](config, capacity)


def transfer_seconds(config: SimConfig, num_tokens: int) -> float:
    """Return the time to transfer the KV of `num_tokens` tokens from another worker."""
    per_token = config.kv_transfer_per_token_seconds * num_tokens
    return (config.kv_transfer_seconds or per_token) * config.time_scale
