"""How fast a simulated worker is: presets, files, and the fit of a file to a bench run.

Theory of operation of the fit. With the latency model `linear` a step takes `1/R` for each prompt
token, `b` if anything decodes and `c` for each sequence that does. A stage of `pointsman bench` has
means: of the gap between tokens `g`, of the time to the first token, of the time of decoding, and
rates. Sequences that decode at a time are, by Little's law, `n = rate · (mean E2E − mean TTFT)`,
and prompt tokens that are computed during a gap `u·rate·g`, for `u` uncached tokens a request. So

    g = b + c·n + (1/R)·u·rate·g

is linear in b, c and 1/R. A first token waits for half of the step that runs, for the prompts
before it (as in a queue M/D/1 of load v = rate·u/R), and then for its own prompt's steps:

    TTFT = g·min(1, n)/2 + (u/R)·(1 + v / (2·(1 − v))) + (b + c·n)·min(1, n)

where v is taken from the solution before, three times. Both kinds of equations are divided by what
was measured, so that least squares makes relative errors small. Everything is per worker: rates are
divided by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleet.command_line import near
from fleet.errors import FleetError, UsageError
from fleet.sim.living_worker import WorkerSettings
from worker.config import CacheConfig, SchedulerConfig, SimConfig
from worker.faults.sim_settings import PRESETS, apply

BLOCK_TOKENS = 16
MAX_MODEL_TOKENS = 1 << 20
_ROUNDS = 3


class WorkerSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `pointsman fit`. Errors are relative root mean squares over the stages."""

    prefill_tokens_per_second: float
    decode_base_seconds: float
    decode_per_sequence_seconds: float
    step_overhead_seconds: float = 0.0
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    itl_error: float | None = None
    ttft_error: float | None = None
    pointsman_worker: int = 1


# llm-d's measurements of Qwen3-32B on two H100 with vLLM: prompt tokens a second and KV tokens as
# published; the times of decode steps are those that give its ITL of 25 ms light and 50 ms heavy.
QWEN3_32B = WorkerSpeed(20_480.0, 0.008, 0.00012, 0.0, 307_328, 256, 8192)
OWN_PRESETS: Mapping[str, WorkerSpeed] = {"qwen3-32b-2xh100": QWEN3_32B}
PRESET_NAMES = (*OWN_PRESETS, *PRESETS)
# Of Dynamo's mocker; the other presets are published without.
_KV_TOKENS, _MAX_NUM_SEQS, _MAX_BATCHED_TOKENS = 262_144, 256, 8192


@dataclass(frozen=True, slots=True)
class Room:
    """What was asked for instead of what the preset or file says; None: nothing."""

    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


def worker_settings(name: str, room: Room, records_events: bool) -> WorkerSettings:
    """A worker by the name of a preset or of a file. Raises `UsageError`."""
    speed = OWN_PRESETS.get(name)
    if speed is None and name not in PRESETS:
        speed = _read(name)
    if speed is None:
        sim = apply(SimConfig(), dict(PRESETS[name]))
        speed = WorkerSpeed(0, 0, 0)
    else:
        sim = SimConfig(
            step_overhead_seconds=speed.step_overhead_seconds,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            decode_base_seconds=speed.decode_base_seconds,
            decode_per_sequence_seconds=speed.decode_per_sequence_seconds,
        )
    kv_tokens = room.kv_tokens or speed.kv_tokens or _KV_TOKENS
    batched = room.max_num_batched_tokens or speed.max_num_batched_tokens or _MAX_BATCHED_TOKENS
    limits = SchedulerConfig(
        max_num_batched_tokens=batched,
        max_num_seqs=room.max_num_seqs or speed.max_num_seqs or _MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_TOKENS,
    )
    cache = CacheConfig(
        max(1, kv_tokens // BLOCK_TOKENS), BLOCK_TOKENS, record_events=records_events
    )
    return WorkerSettings(sim, limits, cache)


def _read(name: str) -> WorkerSpeed:
    path = Path(name)
    if not path.is_file():
        hint = near(name, PRESET_NAMES) or f" ({', '.join(PRESET_NAMES)})"
        raise UsageError(f"--worker: {name} is neither a file nor the name of a preset{hint}")
    try:
        speed = msgspec.json.decode(path.read_bytes(), type=WorkerSpeed)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--worker: {name} is no file of `pointsman fit`: {error}") from error
    times = (
        speed.decode_base_seconds,
        speed.decode_per_sequence_seconds,
        speed.step_overhead_seconds,
    )
    if speed.prefill_tokens_per_second <= 0 or min(times) < 0:
        raise UsageError(
            f"--worker: {name}: prefill_tokens_per_second must be above 0, times not below"
        )
    return speed


class _Spread(msgspec.Struct):
    mean: float


class _Stage(msgspec.Struct):
    """What the fit reads of a stage; the rest of it passes."""

    requests: int
    completed_rate: float
    prompt_tokens: int
    cached_tokens: int
    ttft: _Spread | None
    itl: _Spread | None
    e2e: _Spread | None


class _Run(msgspec.Struct):
    stages: list[_Stage]


def read_stages(path: Path) -> list[_Stage]:
    """Of the JSON of `bench` or `simulate`. Raises `UsageError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Run).stages
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no JSON of `pointsman bench`: {error}") from error


def fit(stages: Sequence[_Stage], workers: int) -> WorkerSpeed:
    """The worker whose times are nearest to those of the stages. Raises `FleetError` where these
    do not tell its three numbers apart.
    """
    rows = [row for one in stages if (row := _means(one, workers)) is not None]
    if len(rows) < 2:
        raise FleetError(
            "a fit needs two stages or more with answers of several tokens, at different loads: "
            "`pointsman bench --rate 1,4,8 --json FILE`"
        )
    gap, ttft, decoding, uncached, rate = map(np.array, zip(*rows, strict=True))
    some = np.minimum(1.0, decoding)
    load = np.zeros(len(rows))
    solution = np.zeros(3)
    for _ in range(_ROUNDS):
        waiting = 1 + load / (2 * (1 - load))
        of_gap = np.column_stack([np.ones(len(rows)), decoding, uncached * rate * gap])
        of_first = np.column_stack([some, decoding * some, uncached * waiting])
        left = np.vstack([of_gap / gap[:, None], of_first / ttft[:, None]])
        right = np.concatenate([np.ones(len(rows)), (ttft - gap * some / 2) / ttft])
        solution, _, rank, _ = np.linalg.lstsq(left, right, rcond=1e-9)
        if rank < 3 or solution[2] <= 0:
            raise FleetError(
                "the stages do not tell a prompt's time from a token's: bench at several rates, "
                "with prompts that are not all cached"
            )
        load = np.minimum(0.9, rate * uncached * solution[2])
    residual = left @ solution - right
    half = len(rows)
    base, per_sequence, per_token = map(float, solution)
    return WorkerSpeed(
        1 / per_token,
        max(0.0, base),
        max(0.0, per_sequence),
        itl_error=_rms(residual[:half]),
        ttft_error=_rms(residual[half:]),
    )


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _means(one: _Stage, workers: int) -> tuple[float, ...] | None:
    """Gap, TTFT, sequences that decode, uncached tokens of a request, requests a second."""
    if one.ttft is None or one.itl is None or one.e2e is None or not one.requests:
        return None
    rate = one.completed_rate / workers
    decoding = rate * (one.e2e.mean - one.ttft.mean)
    uncached = (one.prompt_tokens - one.cached_tokens) / one.requests
    return one.itl.mean, one.ttft.mean, decoding, uncached, rate
