"""The file of `--autoscale`: the groups of workers to scale, their objectives and bounds.

slo: {ttftSeconds: 1, itlSeconds: 0.05, share: 0.95}
capacity: {prefillTokensPerSecond: 8000, decodeBaseSeconds: 0.02, decodePerSequenceSeconds: 0.001}
groups:
- {deployment: pointsman-worker-gpu, maxReplicas: 8, costPerReplicaHour: 2.5}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from picker.config.decode import decode
from picker.config.documents import as_plain, unusable, yaml_loader
from picker.config.findings import Findings, Source
from picker.errors import ConfigError
from picker.framework.disaggregation import DECODE_ROLES, PREFILL_ROLES, ROLE_LABEL
from picker.framework.registry import NonNegativeFloat, NonNegativeInt, PositiveInt
from picker.planner.capacity import LatencyObjective, Stage, WorkerCapacity
from picker.planner.planner import DYNAMO_THRESHOLDS, NO_OBJECTIVE, Mode, Scaling, Thresholds
from picker.types import Endpoint

MAX_BYTES = 1024 * 1024
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")]
_IntervalSeconds = Annotated[float, msgspec.Meta(ge=5)]
# Planning time grows with the number of replicas, on the event loop that also decides.
_MaxReplicas = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_SCALING = ("interval_seconds", "startup_seconds", "patience_intervals")
_BOUNDS = ("min_replicas", "max_replicas", "max_step")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class GroupSection(_Section, frozen=True):
    """The workers of a Deployment; without one, the planned number is only reported."""

    name: str = ""
    deployment: _Name | Literal[""] = ""
    namespace: str = ""
    pool: str = ""
    stage: Literal["both", "prefill", "decode"] = "both"
    min_replicas: NonNegativeInt = 1
    max_replicas: _MaxReplicas = 8
    max_step: PositiveInt | None = None
    cost_per_replica_hour: NonNegativeFloat = 0.0
    capacity: WorkerCapacity | None = None


class AutoscaleSection(_Section, frozen=True):
    groups: tuple[GroupSection, ...]
    mode: Literal["slo", "thresholds"] = "slo"
    slo: LatencyObjective | None = None
    capacity: WorkerCapacity | None = None
    thresholds: Thresholds = DYNAMO_THRESHOLDS
    interval_seconds: _IntervalSeconds = 60.0
    startup_seconds: NonNegativeFloat = 60.0
    patience_intervals: PositiveInt = 5


@dataclass(frozen=True, slots=True)
class ScaledGroup:
    """A group of workers; with `deployment` "" nothing is written; `namespace` "" is the pool's.
    `pool` "" is the only one.
    """

    name: str
    deployment: str
    namespace: str
    scaling: Scaling
    cost_per_replica_hour: float
    pool: str = ""

    def has(self, endpoint: Endpoint) -> bool:
        """Return whether the worker belongs to the group, by its role (`llm-d.ai/role`)."""
        role, stage = endpoint.labels.get(ROLE_LABEL), self.scaling.stage
        if stage is Stage.PREFILL:
            return role in PREFILL_ROLES - DECODE_ROLES
        if stage is Stage.DECODE:
            return role in DECODE_ROLES - PREFILL_ROLES
        return role is None or role in PREFILL_ROLES & DECODE_ROLES


def read_autoscale_file(content: bytes, name: str) -> tuple[ScaledGroup, ...]:
    """Read the groups, at least one; messages call the file `name`. Raises `ConfigError`."""
    with yaml_loader(content, name, "the file", MAX_BYTES) as loader:
        root = loader.get_single_node()
        if root is None:
            raise unusable(name, "the file is empty; it needs a list under the key 'groups'")
        findings = Findings(Source(name, root))
        section = decode(as_plain(loader, root, name, findings), AutoscaleSection, (), findings)
    if section is not None:
        _check(section, findings)
    findings.refuse_errors()
    return () if section is None else tuple(_group(section, one) for one in section.groups)


def groups_of(
    pool: str, pools: Sequence[str], groups: Sequence[ScaledGroup], name: str
) -> tuple[ScaledGroup, ...]:
    """Return the groups of one of the picker's `pools`. Raises `ConfigError`."""
    named = ", ".join(pools)
    for one in groups:
        if not one.pool and len(pools) > 1:
            text = f"group '{one.name}' needs the key pool, one of {named}"
            raise ConfigError(f"{name}: {text}")
        if one.pool and one.pool not in pools:
            text = f"group '{one.name}' has the pool '{one.pool}', which is none of {named}"
            raise ConfigError(f"{name}: {text}")
    return tuple(one for one in groups if one.pool in ("", pool))


def _check(section: AutoscaleSection, findings: Findings) -> None:
    if not section.groups:
        findings.error(("groups",), "is empty; name at least one group of workers")
    if section.mode == "slo" and (
        section.slo is None or section.slo.ttft_seconds is section.slo.itl_seconds is None
    ):
        text = "mode slo needs ttftSeconds or itlSeconds here; or write mode: thresholds"
        findings.error(("slo",), text)
    seen: set[tuple[str, str, str, str]] = set()
    for index, one in enumerate(section.groups):
        at = ("groups", index)
        if section.mode == "slo" and one.capacity is None and section.capacity is None:
            text = "mode slo needs the speeds of a worker here or in each group"
            findings.error(("capacity",), text)
        if one.min_replicas > one.max_replicas:
            text = f"is {one.min_replicas}, more than maxReplicas ({one.max_replicas})"
            findings.error((*at, "minReplicas"), text)
        key = (_name(one), one.pool, one.deployment, one.namespace)
        if key in seen:
            findings.error(at, f"has the name '{key[0]}' of another group; give it a name")
        seen.add(key)


def _name(group: GroupSection) -> str:
    return group.name or group.deployment or group.stage


def _group(section: AutoscaleSection, group: GroupSection) -> ScaledGroup:
    capacity, slo = group.capacity or section.capacity, section.slo or NO_OBJECTIVE
    common = {name: getattr(section, name) for name in _SCALING}
    bounds = {name: getattr(group, name) for name in _BOUNDS}
    scaling = Scaling(
        mode=Mode(section.mode),
        stage=Stage(group.stage),
        worker=capacity,
        objective=slo,
        thresholds=section.thresholds,
        **common,
        **bounds,
    )
    cost = group.cost_per_replica_hour
    return ScaledGroup(
        _name(group), group.deployment, group.namespace, scaling, cost, pool=group.pool
    )
