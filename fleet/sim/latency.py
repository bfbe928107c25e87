"""The speed of a simulated worker: presets, and the files of `pointsman fit`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from base.flags import near
from fleet.errors import UsageError
from fleet.sim.living_worker import WorkerSettings
from worker.config import CacheConfig, SchedulerConfig
from worker.sim.config import SimConfig
from worker.sim.settings import PRESETS, apply

BLOCK_TOKENS = 16
MAX_MODEL_TOKENS = 1 << 20


class WorkerSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `pointsman fit`. Errors are relative root mean squares over the stages."""

    prefill_tokens_per_second: float
    decode_base_seconds: float
    decode_per_sequence_seconds: float
    step_overhead_seconds: float = 0.0
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = False
    template_tokens: int = 0
    overhead_seconds: float = 0.0
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
class WorkerLimits:
    """Values that replace those of the preset or file, unless they are None."""

    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


def worker_settings(name: str, asked: WorkerLimits, records_events: bool) -> WorkerSettings:
    """Build a worker from a preset or a file. Raises `UsageError`."""
    speed = OWN_PRESETS.get(name)
    if speed is None and name not in PRESETS:
        speed = _read(name)
    if speed is not None:
        return settings_of(speed, asked, records_events)
    settings = settings_of(WorkerSpeed(1, 0, 0), asked, records_events)
    return replace(settings, sim=apply(SimConfig(), dict(PRESETS[name])))


def settings_of(
    speed: WorkerSpeed, asked: WorkerLimits, records_events: bool = False
) -> WorkerSettings:
    sim = SimConfig(
        step_overhead_seconds=speed.step_overhead_seconds,
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        decode_base_seconds=speed.decode_base_seconds,
        decode_per_sequence_seconds=speed.decode_per_sequence_seconds,
    )
    kv_tokens = asked.kv_tokens or speed.kv_tokens or _KV_TOKENS
    batched = asked.max_num_batched_tokens or speed.max_num_batched_tokens or _MAX_BATCHED_TOKENS
    limits = SchedulerConfig(
        max_num_batched_tokens=batched,
        max_num_seqs=asked.max_num_seqs or speed.max_num_seqs or _MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_TOKENS,
    )
    cache = CacheConfig(
        max(1, kv_tokens // BLOCK_TOKENS), BLOCK_TOKENS, record_events=records_events
    )
    return WorkerSettings(
        sim, limits, cache, speed.async_scheduling, speed.template_tokens, speed.overhead_seconds
    )


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
        speed.overhead_seconds,
        speed.template_tokens,
    )
    if speed.prefill_tokens_per_second <= 0 or min(times) < 0:
        raise UsageError(
            f"--worker: {name}: prefill_tokens_per_second must be above 0, no other number below"
        )
    return speed
