"""All checks there are, and what they say of some facts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fleet.doctor import (
    envoy_cluster_checks,
    envoy_filter_checks,
    kubernetes_checks,
    kubernetes_picker_checks,
    kubernetes_pod_checks,
    peer_checks,
    picker_checks,
    worker_checks,
)
from fleet.doctor.facts import Facts
from fleet.doctor.findings import Check, Finding

CHECKS: tuple[Check, ...] = (
    *picker_checks.CHECKS,
    *peer_checks.CHECKS,
    *worker_checks.CHECKS,
    *envoy_filter_checks.CHECKS,
    *envoy_cluster_checks.CHECKS,
    *kubernetes_checks.CHECKS,
    *kubernetes_picker_checks.CHECKS,
    *kubernetes_pod_checks.CHECKS,
)


@dataclass(frozen=True, slots=True)
class Told:
    """A finding, and the check that it is of."""

    check: str
    finding: Finding


def diagnose(facts: Facts, only: Collection[str] = ()) -> tuple[Told, ...]:
    """What the checks say, each thing once; `only` those of these names, "": all."""
    return tuple(dict.fromkeys(_told(facts, only)))


def _told(facts: Facts, only: Collection[str]) -> Iterator[Told]:
    for check in CHECKS:
        if not only or check.name in only:
            yield from (Told(check.name, one) for one in check.judge(facts))
