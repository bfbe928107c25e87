"""Frozen configuration of the simulator and of injected faults, resolved by `flags`."""

from dataclasses import dataclass

import msgspec

from worker.config import EngineConfig


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The settings of `--engine sim`: the durations of steps in seconds, and answers in tokens.

    `latency_model` is one of `sim.latency.MODELS`; each reads only its own fields. `time_scale`
    multiplies every step; with 0 no step waits.
    """

    latency_model: str = "linear"
    time_scale: float = 1.0
    seed: int = 0
    # linear: by the contents of a step.
    step_overhead_seconds: float = 0.0
    prefill_tokens_per_second: float = 20_000.0
    prefill_context_seconds: float = 0.0  # per prompt token and token of its context
    decode_base_seconds: float = 0.010  # when anything decodes
    decode_per_sequence_seconds: float = 0.0002
    kv_read_seconds: float = 0.0  # per token of a decoding sequence's context
    # constant and llm-d: per request. A std is at most 30 % of its mean.
    time_to_first_token_seconds: float = 0.0
    time_to_first_token_std_seconds: float = 0.0
    inter_token_latency_seconds: float = 0.0
    inter_token_latency_std_seconds: float = 0.0
    prefill_overhead_seconds: float = 0.0
    prefill_per_token_seconds: float = 0.0
    prefill_std_seconds: float = 0.0
    time_factor_under_load: float = 1.0  # of a full batch
    # dynamo: polynomials; the ratios divide times.
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    # The transfer of KV from another worker: a fixed time or, if that is 0, a time per token.
    kv_transfer_seconds: float = 0.0
    kv_transfer_per_token_seconds: float = 0.0
    # "random" answers with words, "echo" with the prompt.
    mode: str = "random"
    # Answers are drawn from the ids [first_word_id, first_word_id + num_words): the words of the
    # tokenizer in use.
    first_word_id: int = 256
    num_words: int = 1024
    vocab_size: int = 1282
    # The token that ends an answer before the request's limit; None: only the limit ends it.
    end_token_id: int | None = None
    # The ChatML token that begins a turn; None: an echo repeats the whole prompt.
    turn_token_id: int | None = None
    # The distribution of answer lengths, end token included: one of `sim.tokens.OUTPUT_LENGTHS`.
    output_length: str = "geometric"
    mean_output_tokens: float = 128.0
    output_tokens_std: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Injected faults (`worker.sim`). For `startup_seconds` the worker reports itself not ready;
    `reply_headers` are added to every answer of a generation route.
    """

    startup_seconds: float = 0.0
    reply_headers: tuple[tuple[str, str], ...] = ()


def settings_in(config: EngineConfig) -> SimConfig:
    """Return the simulator's settings, which the engine process receives as plain values."""
    if isinstance(config.sim, SimConfig):
        return config.sim
    return SimConfig() if config.sim is None else msgspec.convert(config.sim, SimConfig)
