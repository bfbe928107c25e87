"""`pointsman plan`: the replicas that a load needs, by the model with which the picker scales."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fleet.bench.slo import METRICS, Bound, read_bounds
from fleet.errors import UsageError
from fleet.picker_views import PickerViews
from picker.errors import ConfigError
from picker.planner.autoscale_file import ScaledGroup, read_autoscale_file
from picker.planner.capacity import LatencyObjective, Load, Prediction, predict, replicas_for
from picker.types import BYTES_PER_TOKEN

PER_REQUEST_SHARE = 0.99
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, None: PER_REQUEST_SHARE}
DECISIONS = 50  # decisions of a running picker, for the lengths of prompts
SHOWN = 2  # rows on either side of the answer
_UNSTATED = "give --rate, --input-tokens and --output-tokens, or --bench FILE, or --picker URL"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A plan for a group: `rows` are predictions near `replicas`, which may not be enough."""

    name: str
    replicas: int
    is_enough: bool
    cost_per_hour: float
    rows: tuple[Prediction, ...]


def plan_command(given: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print the plan; return 1 if a group's `maxReplicas` are too few. Raises `FleetError`."""
    groups = _groups(given.file)
    objective = groups[0].scaling.objective
    if given.slo is not None:
        objective = objective_of(given.slo)
    if objective.ttft_seconds is None and objective.itl_seconds is None:
        raise UsageError(f"{given.file} has no slo: add one, or give --slo 'ttft<1s,itl<50ms'")
    load = _load(given)
    plans = [_plan(one, load, objective, given.cost_per_replica_hour) for one in groups]
    if given.json:
        document = {"load": asdict(load), "objective": msgspec.to_builtins(objective)}
        say(json.dumps(document | {"groups": [_plain(one) for one in plans]}, indent=2))
    else:
        for line in _lines(load, objective, plans):
            say(line)
    return 0 if all(one.is_enough for one in plans) else 1


def _plain(plan: GroupPlan) -> dict[str, Any]:
    rows = [
        {name: None if number == math.inf else number for name, number in asdict(row).items()}
        for row in plan.rows
    ]
    return asdict(plan) | {"rows": rows}


def _groups(path: Path) -> tuple[ScaledGroup, ...]:
    try:
        return read_autoscale_file(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError as error:
        raise UsageError(str(error)) from error


def objective_of(text: str) -> LatencyObjective:
    """Read the bounds of `--slo`; the highest share applies to both. Raises `UsageError`."""
    try:
        bounds = read_bounds(text)
    except ValueError as error:
        raise UsageError(f"--slo {error}") from error
    found: dict[str, Bound] = {}
    for bound in bounds:
        if bound.metric not in METRICS[:2] or bound.quantile not in SHARES:
            raise UsageError(
                f"--slo: {bound} cannot be planned for; give ttft or itl, for each request or at "
                "p50, p95 or p99"
            )
        if bound.metric in found:
            raise UsageError(f"--slo bounds {bound.metric} twice; give one bound of it")
        found[bound.metric] = bound
    share = max(SHARES[bound.quantile] for bound in bounds)
    ttft, itl = (None if (one := found.get(name)) is None else one.seconds for name in METRICS[:2])
    return LatencyObjective(ttft_seconds=ttft, itl_seconds=itl, share=share)


def _load(given: argparse.Namespace) -> Load:
    load = Load(0.0, 0.0, 0.0)
    if given.bench is not None:
        load = load_of_bench(given.bench)
    elif given.picker is not None:
        load = load_of_picker(PickerViews(given.picker))
    share = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
    share = share if given.cached_share is None else given.cached_share
    flags = {
        "rate": ("--rate", given.rate),
        "prompt_tokens": ("--input-tokens", given.input_tokens),
        "output_tokens": ("--output-tokens", given.output_tokens),
    }
    load = replace(load, **{name: one for name, (_, one) in flags.items() if one is not None})
    missing = [flag for name, (flag, _) in flags.items() if not getattr(load, name)]
    if missing:
        raise UsageError(f"{', '.join(missing)} of the load is unknown or 0: {_UNSTATED}")
    return replace(load, cached_tokens=share * load.prompt_tokens)


class _BenchStage(msgspec.Struct, frozen=True):
    requests: int
    errors: dict[str, int]
    offered_rate: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class _Bench(msgspec.Struct, frozen=True):
    stages: tuple[_BenchStage, ...]


def load_of_bench(path: Path) -> Load:
    """Return the load that a bench offered in its last stage. Raises `UsageError`."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Bench)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no JSON of pointsman bench: {error}") from error
    if not found.stages:
        raise UsageError(f"{path} has no stages")
    last = found.stages[-1]
    good = last.requests - sum(last.errors.values())
    if good < 1:
        raise UsageError(f"{path}: no request of the last stage was answered")
    prompt, output, cached = (
        tokens / good for tokens in (last.prompt_tokens, last.output_tokens, last.cached_tokens)
    )
    return Load(last.offered_rate, prompt, output, cached)


def load_of_picker(views: PickerViews) -> Load:
    """Measure the load of a picker's pool; 0 means unknown. Raises `FleetError`."""
    seen = views.look(0, DECISIONS)
    records = [views.decision(one.request_id) for one in seen.decisions]
    rate, tokens = seen.pool.pool.requests_per_second or 0.0, seen.pool.pool.tokens_per_second
    known = [one for one in records if one.prompt_tokens or one.size_bytes]
    prompts = [one.prompt_tokens or one.size_bytes / BYTES_PER_TOKEN for one in known]
    cached = [one.cached_tokens or one.matched_prefix_tokens or 0 for one in known]
    count = max(1, len(known))
    output = tokens / rate if tokens and rate else 0.0
    return Load(rate, sum(prompts) / count, output, sum(cached) / count)


def _plan(
    group: ScaledGroup, load: Load, objective: LatencyObjective, cost: float | None
) -> GroupPlan:
    scaling = group.scaling
    if scaling.worker is None:
        raise UsageError(f"group {group.name} has no capacity: add it to the file")
    most = scaling.max_replicas
    wanted, within = replicas_for(load, scaling.worker, objective, scaling.stage, most)
    wanted = max(wanted, scaling.min_replicas)
    near = range(max(1, wanted - SHOWN), min(most, wanted + SHOWN) + 1)
    rows = tuple(predict(load, n, scaling.worker, objective, scaling.stage) for n in near)
    price = group.cost_per_replica_hour if cost is None else cost
    return GroupPlan(group.name, wanted, within >= objective.share, wanted * price, rows)


def _lines(load: Load, objective: LatencyObjective, plans: Sequence[GroupPlan]) -> Iterator[str]:
    bounds = {"TTFT": objective.ttft_seconds, "ITL": objective.itl_seconds}
    wanted = " and ".join(f"{name} within {s * 1e3:g} ms" for name, s in bounds.items() if s)
    yield (
        f"{load.rate:g} requests/s, {load.prompt_tokens:,.0f} prompt tokens "
        f"({load.cached_tokens:,.0f} cached), {load.output_tokens:,.0f} answer tokens"
    )
    yield f"objective: {objective.share:.4g} of the requests with {wanted}"
    for plan in plans:
        yield ""
        cost = f", {plan.cost_per_hour:g} an hour" if plan.cost_per_hour else ""
        short = "" if plan.is_enough else " (maxReplicas, too few)"
        yield f"{plan.name}: {plan.replicas} replicas{short}{cost}"
        quantile = f"p{objective.share * 100:g}"
        head = ("replicas", "within", f"TTFT {quantile}", f"ITL {quantile}", "busy", "running")
        yield "".join(f"{cell:>11}" for cell in head)
        for row in plan.rows:
            mark = " <-" if row.replicas == plan.replicas else ""
            cells = (
                str(row.replicas), f"{row.within:.2%}", _milliseconds(row.ttft_seconds),
                _milliseconds(row.itl_seconds), f"{row.busy:.0%}", f"{row.running:.1f}",
            )  # fmt: skip
            yield "".join(f"{cell:>11}" for cell in cells) + mark


def _milliseconds(value: float) -> str:
    if value == math.inf:
        return "overload"
    return f"{value * 1e3:,.0f} ms" if value else "-"
