"""`pointsman fit`: the worker of `simulate` whose times are nearest to those of a bench run.

With the latency model `linear` a step takes `1/R` for each prompt
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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleet.bench.report import write_text
from fleet.errors import FleetError, UsageError
from fleet.sim.fit_flags import build_parser
from fleet.sim.latency import WorkerSpeed

_ROUNDS = 3


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
    if not (one.itl.mean > 0 and one.ttft.mean > 0):
        return None
    rate = one.completed_rate / workers
    decoding = rate * (one.e2e.mean - one.ttft.mean)
    uncached = (one.prompt_tokens - one.cached_tokens) / one.requests
    return one.itl.mean, one.ttft.mean, decoding, uncached, rate


def fit_command(argv: Sequence[str], out: Callable[[str], None]) -> int:
    """Run `pointsman fit RUN FILE`. Raises `FleetError`."""
    flags = build_parser().parse_args(argv)
    speed = fit(read_stages(flags.run), flags.workers)
    speed = msgspec.structs.replace(speed, kv_tokens=flags.kv_tokens)
    text = msgspec.json.format(msgspec.json.encode(speed)).decode()
    try:
        write_text(flags.out, text + "\n")
    except OSError as error:
        raise FleetError(f"cannot write {flags.out}: {error}") from error
    out(
        f"{speed.prefill_tokens_per_second:,.0f} prompt tokens/s; a decode step of n sequences "
        f"takes {speed.decode_base_seconds * 1e3:.3g} ms + "
        f"n × {speed.decode_per_sequence_seconds * 1e3:.3g} ms"
    )
    out(
        f"error over the stages (root mean square): ITL {speed.itl_error or 0.0:.1%}, "
        f"TTFT {speed.ttft_error or 0.0:.1%}"
    )
    return 0
