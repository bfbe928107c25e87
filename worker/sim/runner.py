"""An executor without a model: it waits for a step's modelled time and draws repeatable tokens."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.config import EngineConfig
from worker.errors import CRASH_STATUS, ConfigError
from worker.executor.interface import HostExecutor
from worker.sim.config import SimConfig, settings_in
from worker.sim.latency import Capacity, LatencyModel, build_model, is_decoding, transfer_seconds
from worker.sim.tokens import TokenSource, pooled_states
from worker.types import (
    Draw,
    KvLoad,
    ModelOutput,
    SampleSpec,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

_MAX_REMEMBERED = 4096
TOKEN_BYTES = 4
_LINE_BREAK = 10  # in the simulator's own tokenizer


class TokenCache:
    """Owns one token id for each slot of every block: the id stands for the token's KV."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = array("i", bytes(TOKEN_BYTES * num_blocks * block_size))
        # Echoes by sequence: a cache, so that each prompt is read once.
        self._echoes: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); all are read before any is written."""
        size = self._block_size
        # Sources may be destinations of other pairs, so read all of them first.
        contents = [self._slots[source * size : (source + 1) * size] for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self._slots[target * size : (target + 1) * size] = content

    def write(self, sequence: ScheduledSequence) -> None:
        self._put(array("i", sequence.token_ids), sequence.block_table, sequence.start)

    def load(self, load: KvLoad) -> None:
        self._put(array("i", b"".join(load.parts)), load.blocks, 0)

    def read(self, block_table: Sequence[int], num_tokens: int) -> memoryview:
        return memoryview(array("i", self._read(block_table, num_tokens))).cast("B")

    def _put(self, tokens: array[int], block_table: Sequence[int], position: int) -> None:
        size, done = self._block_size, 0
        while done < len(tokens):
            block, offset = divmod(position + done, size)
            count = min(size - offset, len(tokens) - done)
            slot = block_table[block] * size + offset
            self._slots[slot : slot + count] = tokens[done : done + count]
            done += count

    def echo(
        self, sequence: ScheduledSequence, num_prompt: int, turn: int | None, end: int | None
    ) -> tuple[int, ...]:
        known = self._echoes.get(sequence.seq_id)
        if known is None:
            known = spoken(self._read(sequence.block_table, num_prompt), turn, end)
            self._echoes[sequence.seq_id] = known
            if len(self._echoes) > _MAX_REMEMBERED:
                self._echoes.popitem(last=False)
        return known

    def _read(self, block_table: Sequence[int], num_tokens: int) -> list[int]:
        size = self._block_size
        tokens: list[int] = []
        for block in block_table[: -(-num_tokens // size)]:
            tokens += self._slots[block * size : (block + 1) * size]
        return tokens[:num_tokens]


def spoken(prompt: Sequence[int], turn: int | None, end: int | None) -> tuple[int, ...]:
    """Return the part of a prompt that an echo repeats: in a conversation (turns are `turn`, role,
    line break, text, `end`) the text of the last complete turn, else all of it; no control tokens.
    """
    tokens = list(prompt)
    if turn is not None and end in tokens and turn in tokens:
        last = len(tokens) - 1 - tokens[::-1].index(end)
        starts = [i for i in range(last) if tokens[i] == turn]
        if starts:
            head = tokens[starts[-1] + 1 : last]
            tokens = head[head.index(_LINE_BREAK) + 1 :] if _LINE_BREAK in head else head
    return tuple(t for t in tokens if t not in (turn, end))


DEFAULT_SIM_BLOCKS = 4096
MAX_STEP_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class SimLimits:
    num_blocks: int = DEFAULT_SIM_BLOCKS
    block_size: int = 16
    max_num_seqs: int = 128

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.max_num_seqs, self.num_blocks * self.block_size)


class RealTime:
    """Waits for the end of steps on the wall clock.

    The time between a step and one that follows it counts towards the second step, up to
    `catch_up_seconds`: on average, steps take exactly the model's time.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        catch_up_seconds: float = 0.1,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._catch_up_seconds = catch_up_seconds
        self._end = clock()

    def __call__(self, seconds: float, follows: bool) -> None:
        now = self._clock()
        start = max(self._end, now - self._catch_up_seconds) if follows else now
        self._end = start + seconds
        if self._end > now:
            self._sleep(self._end - now)


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sim: dict[str, Any] = {}
    slow_factor: float | None = None
    hang_seconds: float | None = None
    crash_after_requests: int | None = None
    crash_after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts built from a configuration; replaced as a whole."""

    config: SimConfig
    latency: LatencyModel
    source: TokenSource


class SimExecutor(HostExecutor):
    """Executes steps with the latency model of `SimConfig`; token ids stand for KV.

    `wait(seconds, follows)` lets a step's time pass, above 0 seconds; the step `follows` if the
    engine was busy until then. `crash` ends the process. Implements `KvMemory`.
    """

    kv_shape = ("int32", 1, 1, 1)
    kv_facts = ("sim",)

    def __init__(
        self,
        config: SimConfig,
        wait: Callable[[float, bool], None],
        limits: SimLimits | None = None,
        crash: Callable[[], None] = lambda: os._exit(CRASH_STATUS),
        moves_kv: bool = False,
    ) -> None:
        self._limits = limits or SimLimits()
        self._wait = wait
        self._crash = crash
        self._parts = self._build(config)
        self._is_echo = config.mode == "echo"
        self._cache: TokenCache | None = None
        if self._is_echo or moves_kv:
            self._cache = TokenCache(self._limits.num_blocks, self._limits.block_size)
        self._modelled_seconds = 0.0
        self._slow_factor = 1.0
        self._hang_seconds = 0.0
        self._is_hanging = False
        self._released = threading.Event()
        self._requests_left: int | None = None
        self._tokens_left: int | None = None

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self._hang()
        parts = self._parts
        if self._cache is not None:
            self._cache.copy(step.block_copies)
            for load in step.kv_loads:
                self._cache.load(load)
        sampled: dict[int, tuple[Draw, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        pooled: dict[int, list[float]] = {}
        for sequence in step.sequences:
            if self._cache is not None:
                self._cache.write(sequence)
            if sequence.num_pooled:
                pooled[sequence.seq_id] = pooled_states(sequence.token_ids[-sequence.num_pooled :])
            if sequence.prompt_targets:
                prompt_logprobs[sequence.seq_id] = _prompt_logprobs(parts.source, sequence)
            if not sequence.samples:
                continue
            draws = self._draws(parts, sequence)
            if draws is None:
                failed[sequence.seq_id] = "the request's constraints leave no token to draw"
                prompt_logprobs.pop(sequence.seq_id, None)
            else:
                sampled[sequence.seq_id] = draws
        seconds = self.step_seconds(step)
        if seconds > 0:
            # Set before the wait: the watchdog reads it from another thread.
            self._modelled_seconds = seconds
            # A decoding sequence ran in the step before, so the engine was busy.
            self._wait(seconds, any(map(is_decoding, step.sequences)))
            self._modelled_seconds = 0.0
        self._count(step, sampled)
        return ModelOutput(sampled, prompt_logprobs, failed, pooled=pooled)

    def step_seconds(self, step: SchedulerOutput) -> float:
        """Return the duration of a step, at most `MAX_STEP_SECONDS` whatever the settings are."""
        parts = self._parts
        scale = parts.config.time_scale * self._slow_factor
        return min(MAX_STEP_SECONDS, parts.latency.seconds(step) * scale) if scale else 0.0

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        if self._cache is None:
            raise RuntimeError("the simulator was built without KV that moves")
        return self._cache.read(blocks, num_tokens)

    def transfer_seconds(self, num_tokens: int) -> float:
        return min(MAX_STEP_SECONDS, transfer_seconds(self._parts.config, num_tokens))

    @property
    def modelled_seconds(self) -> float:
        """The time of the running step, readable in any thread: a slow model is no stuck device."""
        return self._modelled_seconds

    def configure(self, settings: dict[str, Any]) -> None:
        """Change the behaviour from the next step on; all or nothing. Raise `ConfigError`.

        `slow_factor` multiplies steps; `hang_seconds` blocks the next step, and 0 releases it;
        `crash_after_requests` and `crash_after_tokens` end the process after that number
        of further first tokens or tokens (0: now).
        """
        try:
            given = msgspec.convert(settings, _Settings)
            config = dataclasses.replace(self._parts.config, **given.sim)
            parts = self._build(msgspec.convert(dataclasses.asdict(config), SimConfig))
        except (msgspec.ValidationError, TypeError, KeyError) as error:
            raise ConfigError(str(error)) from error
        # Running sequences have no stored prompts to echo unless the mode was set at the start.
        if config.mode != self._parts.config.mode:
            raise ConfigError("the simulator's mode cannot change while it runs")
        self._parts = parts
        if given.slow_factor is not None:
            self._slow_factor = given.slow_factor
        if given.hang_seconds is not None:
            self._hang_seconds = given.hang_seconds
            if not given.hang_seconds:
                self._released.set()
        if 0 in (given.crash_after_requests, given.crash_after_tokens):
            self._crash()
            return
        if given.crash_after_requests is not None:
            self._requests_left = given.crash_after_requests
        if given.crash_after_tokens is not None:
            self._tokens_left = given.crash_after_tokens

    @property
    def is_hanging(self) -> bool:
        return self._is_hanging

    def shutdown(self) -> None:
        self._released.set()  # a hanging step must end with the executor

    def _build(self, config: SimConfig) -> _Parts:
        return _Parts(config, build_model(config, self._limits.capacity), TokenSource(config))

    def _hang(self) -> None:
        seconds, self._hang_seconds = self._hang_seconds, 0.0
        if seconds:
            self._released.clear()
            self._is_hanging = True
            self._released.wait(seconds)
            self._is_hanging = False

    def _draws(self, parts: _Parts, sequence: ScheduledSequence) -> tuple[Draw, ...] | None:
        source, config = parts.source, parts.config
        echo: tuple[int, ...] | None = None
        if self._cache is not None and self._is_echo:
            num_prompt = sequence.samples[0].num_prompt
            echo = self._cache.echo(sequence, num_prompt, config.turn_token_id, config.end_token_id)
        if sequence.num_drafts:
            return _verified(source, sequence, echo)
        draws: list[Draw] = []
        for sample in sequence.samples:
            draw = _draw(source, sequence.token_ids[-1], sample, echo)
            if draw is None:
                return None
            draws.append(draw)
        return tuple(draws)

    def _count(self, step: SchedulerOutput, sampled: Mapping[int, tuple[Draw, ...]]) -> None:
        if self._requests_left is None and self._tokens_left is None:
            return
        samples = [sample for sequence in step.sequences for sample in sequence.samples[:1]]
        num_first = sum(sample.position == sample.num_prompt for sample in samples)
        num_tokens = sum(map(len, sampled.values()))
        if self._requests_left is not None:
            self._requests_left -= num_first
        if self._tokens_left is not None:
            self._tokens_left -= num_tokens
        if any(left is not None and left <= 0 for left in (self._requests_left, self._tokens_left)):
            # A test's `crash` returns; it must not be called again.
            self._requests_left = self._tokens_left = None
            self._crash()


def _draw(
    source: TokenSource, last_token: int, sample: SampleSpec, echo: tuple[int, ...] | None
) -> Draw | None:
    """Draw the token after `last_token`, with its log probabilities; None if none is allowed."""
    token = source.draw(last_token, sample, echo)
    if token is None:
        return None
    if sample.params.logprobs is None:
        return Draw(token)
    return Draw(token, source.logprobs(last_token, token, sample))


def _verified(
    source: TokenSource, sequence: ScheduledSequence, echo: tuple[int, ...] | None
) -> tuple[Draw, ...] | None:
    """Return the accepted drafts and one more token: exactly the draws without speculation. If no
    token is allowed after the accepted drafts, return only these; the next step fails.
    """
    drafts, (sample,) = sequence.drafts, sequence.samples
    last_token = sequence.token_ids[-1 - len(drafts)]
    draws: list[Draw] = []
    for place, draft in enumerate([*drafts, None]):
        draw = _draw(source, last_token, sample.after(drafts[:place]), echo)
        if draw is None:
            break
        draws.append(draw)
        last_token = draw.token_id
        if last_token != draft:
            break
    return tuple(draws) or None


def _prompt_logprobs(source: TokenSource, sequence: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
    return tuple(
        source.prompt_logprobs(
            sequence.token_ids[i], target, sequence.start + i + 1, sequence.num_prompt_logprobs
        )
        for i, target in enumerate(sequence.prompt_targets)
    )


def build_sim_executor(config: EngineConfig) -> tuple[SimExecutor, int]:
    num_blocks = config.num_blocks_override
    if num_blocks is None:
        num_blocks = DEFAULT_SIM_BLOCKS
    limits = SimLimits(num_blocks, config.block_size, config.scheduler.max_num_seqs)
    moves_kv = config.kv_transfer is not None
    return SimExecutor(settings_in(config), RealTime(), limits, moves_kv=moves_kv), num_blocks
