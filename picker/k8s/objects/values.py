"""What an InferencePool says, in one form whichever version it was written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from picker.k8s.objects.pool import AppProtocol, FailureMode


@dataclass(frozen=True, slots=True)
class PickerReference:
    """Who chooses among the pool's endpoints; `port` is that of its Service, None for other kinds
    that name none.
    """

    group: str
    kind: str
    name: str
    port: int | None
    failure_mode: FailureMode


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Which Pods make up a pool and how they serve.

    `selector` has at least one label; a Pod has to have all of them. Each of the 1 to 8 different
    `target_ports` is an endpoint of its own on every Pod.
    """

    selector: Mapping[str, str]
    target_ports: tuple[int, ...]
    app_protocol: AppProtocol
    picker: PickerReference | None

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a Pod with these labels belongs to the pool."""
        return all(labels.get(key) == value for key, value in self.selector.items())

    @property
    def label_selector(self) -> str:
        """The selector as the parameter `labelSelector` of a list or a watch."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.selector.items()))


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool. `generation` moves when its spec changes, where the API server counts it;
    one that `is_deleting` is about to be gone.
    """

    name: str
    namespace: str
    uid: str
    resource_version: str
    generation: int | None
    is_deleting: bool
    api_version: str
    spec: PoolSpec
