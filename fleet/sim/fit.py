"""`pointsman fit`: the worker of `simulate` whose times are nearest to those of a bench run.

With the latency model `linear` a step takes `1/R` for each prompt token, `b` if anything decodes
and `c` for each sequence that does; a request has a fixed overhead `d` besides.

**Guess.** A stage of `pointsman bench` has means: of the gap between tokens `g`, of the time to the
first token, of the time of decoding, and rates. By Little's law `n = rate · (mean E2E − mean TTFT)`
sequences decode at a time, and `u·rate·g` prompt tokens are computed during a gap, for `u` uncached
tokens a request. A first token waits for half of the step that runs and for the one after it, for
the prompts before it (as in a queue M/D/1 of load v = rate·u/R), and for its own prompt's steps:

    g = b + c·n + (1/R)·u·rate·g
    TTFT = 1.5·g·min(1, n) + (u/R)·(1 + v / (2·(1 − v))) + (b + c·n)·min(1, n)

These are linear in b, c and 1/R, with v from the solution before, three times. Both are divided by
what was measured, so that least squares makes relative errors small. Rates are per worker.

**Refinement.** `simulate` repeats the arrivals and lengths of the run. Levenberg and Marquardt's
method changes R, b, c and d until the logarithms of simulated p50 and p95 of TTFT, ITL and E2E are
nearest to those of the measured ones, over all stages.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from base.flags import Parser, add_flags, rows
from fleet.bench.flags import LOAD, LOAD_DIALECT, LoadSettings, refuse_unwritable
from fleet.bench.load import loads_of, sessions_of
from fleet.bench.report import write_text
from fleet.bench.summary import Spread, Summary, summary
from fleet.errors import FleetError, UsageError
from fleet.sim.latency import WorkerLimits, WorkerSpeed, settings_of
from fleet.sim.simulation import Tenant, simulate
from fleet.sim.virtual_fleet import Simulation

_GUESSES, _REFINEMENTS = 3, 16
_STEP = 0.05
_ENOUGH, _MIN_GAIN = 0.005, 0.02  # errors as a root mean square; of their squares
# Below these a run does not determine a number: the ratio of decoding sequences between stages; the
# load by prompts, if all have one length; the part of the time to the first token.
_MIN_SPREAD, _MIN_LOAD, _MIN_PART = 1.2, 0.3, 0.02
_LARGE_ERROR = 0.5
_METRICS = ("ttft", "itl", "e2e")
_QUANTILES = {"p50": 1.0, "p95": 0.5}  # with their weights
Numbers = NDArray[np.float64]


class _Stage(msgspec.Struct):
    requests: int
    completed_rate: float
    prompt_tokens: int
    cached_tokens: int
    ttft: Spread | None
    itl: Spread | None
    e2e: Spread | None


class _Run(msgspec.Struct):
    stages: list[_Stage]
    settings: dict[str, Any] = {}


def read_run(path: Path) -> _Run:
    """Read the JSON of `bench` or `simulate`. Raises `UsageError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Run)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no JSON of `pointsman bench`: {error}") from error


def load_of(settings: dict[str, Any]) -> LoadSettings:
    parser = Parser(prog="the run's settings", add_help=False)
    add_flags(parser, LOAD, LOAD_DIALECT)
    known = {row.dest for row in rows(LOAD) if row.group != "results"}
    argv = []
    for name in sorted(known & set(settings)):
        value = settings[name]
        if name == "burstiness" and value is None:  # JSON has no infinity
            value = "inf"
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            argv += [f"--{name.replace('_', '-')}", text]
    return LoadSettings(**vars(parser.parse_args(argv)))


def guess(stages: Sequence[_Stage], workers: int) -> WorkerSpeed:
    """Solve for the speed of a worker from the stages' means. Raises `FleetError`."""
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
    for _ in range(_GUESSES):
        waiting = 1 + load / (2 * (1 - load))
        of_gap = np.column_stack([np.ones(len(rows)), decoding, uncached * rate * gap])
        of_first = np.column_stack([some, decoding * some, uncached * waiting])
        left = np.vstack([of_gap / gap[:, None], of_first / ttft[:, None]])
        right = np.concatenate([np.ones(len(rows)), (ttft - 1.5 * gap * some) / ttft])
        solution, _, rank, _ = np.linalg.lstsq(left, right, rcond=1e-9)
        if rank < 3 or solution[2] <= 0:
            raise FleetError(
                "the stages do not separate a prompt's time from a token's: bench at several "
                "rates, with prompts that are not all cached"
            )
        load = np.minimum(0.9, rate * uncached * solution[2])  # at 1 the wait is infinite
    base, per_sequence, per_token = map(float, solution)
    return WorkerSpeed(1 / per_token, max(0.0, base), max(0.0, per_sequence), async_scheduling=True)


def _means(one: _Stage, workers: int) -> tuple[float, ...] | None:
    """Return gap, TTFT, decoding sequences, uncached tokens per request, and requests a second."""
    if one.ttft is None or one.itl is None or one.e2e is None or not one.requests:
        return None
    if not (one.itl.mean > 0 and one.ttft.mean > 0):
        return None
    rate = one.completed_rate / workers
    decoding = rate * (one.e2e.mean - one.ttft.mean)
    uncached = (one.prompt_tokens - one.cached_tokens) / one.requests
    return one.itl.mean, one.ttft.mean, decoding, uncached, rate


def require_variation(run: _Run, speed: WorkerSpeed, workers: int) -> None:
    rows = [row for one in run.stages if (row := _means(one, workers)) is not None]
    decoding = [row[2] for row in rows]
    if max(decoding) < _MIN_SPREAD * min(decoding):
        raise FleetError(
            "the load does not vary: every stage has about as many sequences at a time, so the two "
            "times of a decode step cannot be separated; bench at several rates, one of them near "
            "the worker's limit"
        )
    made = load_of(run.settings)
    lengths = made.input_tokens
    is_one_length = lengths.low == lengths.high and made.turns.high == 1
    is_one_length = is_one_length and made.prefix_tokens is None and made.trace is None
    load = max(uncached * rate for *_, uncached, rate in rows) / speed.prefill_tokens_per_second
    if is_one_length and load < _MIN_LOAD:
        raise FleetError(
            f"the prompts do not vary: all have {lengths.low} tokens, and no rate is near the "
            "worker's limit, so a prompt's time cannot be distinguished from the fixed time; "
            "bench with lengths such as --input-tokens 64..1024, or at a higher rate"
        )


def require_prompt_time(run: _Run, speed: WorkerSpeed) -> None:
    parts = [
        (one.prompt_tokens - one.cached_tokens)
        / one.requests
        / speed.prefill_tokens_per_second
        / one.ttft.p50
        for one in run.stages
        if one.ttft is not None and one.requests
    ]
    if max(parts) < _MIN_PART:
        raise FleetError(
            f"prompts take {max(parts):.1%} of the time to the first token at most, so their speed "
            "cannot be determined; bench with longer prompts of several lengths, such as "
            "--input-tokens 256..4096, and one rate near the worker's limit"
        )


class Refinement:
    """Repeats the load of measured stages with other workers. Raises `UsageError`."""

    def __init__(self, run: _Run, workers: int) -> None:
        self._settings = load_of(run.settings)
        self._sessions, self._loads = sessions_of(self._settings), list(loads_of(self._settings))
        if len(self._loads) != len(run.stages):
            raise UsageError("a fit needs a run of one endpoint or configuration")
        self._workers = workers
        self._stages = run.stages

    def simulated(self, speed: WorkerSpeed) -> list[Summary]:
        every = []
        worker = settings_of(speed, WorkerLimits())
        simulation = Simulation(self._workers, worker, None, True, self._settings.seed)
        for draws, load in enumerate(self._loads):
            tenant = Tenant(load.name, self._settings, load, self._sessions)
            [stage] = simulate(simulation, [tenant], draws)
            every.append(summary(stage, None))
        return every

    def errors(self, every: Sequence[Summary]) -> Numbers:
        """Return logarithms of simulated over measured values, by stage, metric and quantile."""
        found = np.zeros((len(self._stages), len(_METRICS), len(_QUANTILES)))
        for row, (one, measured) in enumerate(zip(every, self._stages, strict=True)):
            for column, metric in enumerate(_METRICS):
                ours, theirs = getattr(one, metric), getattr(measured, metric)
                for depth, name in enumerate(_QUANTILES):
                    pair = (getattr(ours, name, 0.0), getattr(theirs, name, 0.0))
                    if min(pair) > 0:
                        found[row, column, depth] = np.log(pair[0] / pair[1])
        return found

    def template_tokens(self, every: Sequence[Summary]) -> int:
        theirs = sum(one.prompt_tokens for one in self._stages)
        ours = sum(one.prompt_tokens for one in every)
        return max(0, round((theirs - ours) / max(1, sum(one.requests for one in every))))

    def refined(self, speed: WorkerSpeed) -> WorkerSpeed:
        tokens = self.template_tokens(self.simulated(speed))
        speed = msgspec.structs.replace(speed, template_tokens=tokens)
        first = min(one.ttft.p50 for one in self._stages if one.ttft is not None)
        gap = min(one.itl.p50 for one in self._stages if one.itl is not None)
        # The unit of each number, so that all are of similar size.
        scale = np.array([1 / speed.prefill_tokens_per_second, gap, gap / 10, first / 4])
        begun = (1 / speed.prefill_tokens_per_second, speed.decode_base_seconds,
                 speed.decode_per_sequence_seconds, speed.overhead_seconds)  # fmt: skip

        def made(numbers: Numbers) -> WorkerSpeed:
            per_token, base, per_sequence, overhead = map(float, numbers * scale)
            return msgspec.structs.replace(
                speed,
                prefill_tokens_per_second=1 / per_token,
                decode_base_seconds=base,
                decode_per_sequence_seconds=per_sequence,
                overhead_seconds=overhead,
            )

        weights = np.array(list(_QUANTILES.values()))

        def residuals(numbers: Numbers) -> Numbers:
            errors = self.errors(self.simulated(made(numbers))) * weights
            return cast("Numbers", errors.reshape(-1))

        least = np.array([1e-3, 0.0, 0.0, 0.0])  # the first is a divisor
        numbers = nearest(residuals, np.maximum(np.array(begun) / scale, least), least)
        found = made(numbers)
        squares = np.square(self.errors(self.simulated(found))).mean(axis=(0, 2)) ** 0.5
        return msgspec.structs.replace(
            found, ttft_error=float(squares[0]), itl_error=float(squares[1])
        )


def nearest(residuals: Callable[[Numbers], Numbers], begun: Numbers, least: Numbers) -> Numbers:
    """Run Levenberg and Marquardt's method; numbers stay above `least`. Slopes are differences at
    first, then follow the steps taken (Broyden), and are measured again if they mislead.
    """
    numbers, damping = begun, 0.01
    now, slopes, is_new = residuals(numbers), np.zeros((0, 0)), False
    for _ in range(_REFINEMENTS):
        if not slopes.size:
            steps = _STEP * np.eye(len(numbers))
            slopes = np.array([residuals(numbers + step) - now for step in steps]).T / _STEP
            is_new = True
        normal = slopes.T @ slopes
        damped = normal + damping * (np.diag(np.diag(normal)) + 1e-6 * np.eye(len(numbers)))
        tried = np.maximum(least, numbers - np.linalg.solve(damped, slopes.T @ now))
        then, move = residuals(tried), tried - numbers
        if then @ then < now @ now:
            gain = 1 - (then @ then) / (now @ now)
            slopes = slopes + np.outer(then - now - slopes @ move, move) / (move @ move)
            numbers, now, damping = tried, then, damping / 4
            if now @ now < _ENOUGH**2 * len(now) or (is_new and gain < _MIN_GAIN):
                break
            if gain < _MIN_GAIN:
                slopes = np.zeros((0, 0))
            is_new = False
        elif is_new:
            damping *= 8
        else:
            slopes = np.zeros((0, 0))
    return numbers


def fit_command(flags: argparse.Namespace, out: Callable[[str], None]) -> int:
    """Run `pointsman fit`. Raises `FleetError`, and then writes nothing."""
    run = read_run(flags.run)
    refuse_unwritable(flags.out)
    if flags.out.exists() and flags.out.samefile(flags.run):
        raise UsageError(f"FILE would replace the run {flags.run}: give it another name")
    speed = msgspec.structs.replace(guess(run.stages, flags.workers), kv_tokens=flags.kv_tokens)
    refinement = Refinement(run, flags.workers)
    require_variation(run, speed, flags.workers)
    speed = refinement.refined(speed)
    require_prompt_time(run, speed)
    text = msgspec.json.format(msgspec.json.encode(speed)).decode()
    write_text(flags.out, text + "\n")
    out(
        f"{speed.prefill_tokens_per_second:,.0f} prompt tokens/s; a decode step of n sequences "
        f"takes {speed.decode_base_seconds * 1e3:.3g} ms + "
        f"n × {speed.decode_per_sequence_seconds * 1e3:.3g} ms; "
        f"{speed.overhead_seconds * 1e3:.3g} ms and {speed.template_tokens} tokens a request more"
    )
    out(
        "error of p50 and p95 over the stages (root mean square): "
        f"ITL {speed.itl_error or 0.0:.1%}, TTFT {speed.ttft_error or 0.0:.1%}"
    )
    if max(speed.itl_error or 0.0, speed.ttft_error or 0.0) > _LARGE_ERROR:
        out(
            "errors this large mean that no such worker acts as the measured one did: check "
            "--workers and --kv-tokens, and whether the worker's limits are simulate's"
        )
    return 0
