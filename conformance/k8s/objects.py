"""The objects of the suite: pools, and Pods whose IPs are addresses of the loopback."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]
FINALIZER = "conformance.pointsman.dev/held"


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """An InferencePool and the Pods that serve it.

    `addresses` are those of its Pods, in their order; `spare` are further ones, at which the
    suite's servers listen as well. `ports` are its target ports; `spare_ports` likewise.
    """

    name: str
    addresses: Sequence[str]
    ports: Sequence[int]
    spare: Sequence[str] = ()
    spare_ports: Sequence[int] = ()
    is_h2c: bool = False
    is_open: bool = False
    has_object: bool = True

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels that select its Pods."""
        return {"app": self.name}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All `ip:port` of the pool as planned."""
        return tuple(f"{ip}:{port}" for ip in self.addresses for port in self.ports)

    @property
    def served(self) -> tuple[str, ...]:
        """All `ip:port` at which the suite's servers listen for it."""
        ports = (*self.ports, *self.spare_ports)
        return tuple(f"{ip}:{port}" for ip in (*self.addresses, *self.spare) for port in ports)

    def pod(self, index: int) -> str:
        """The name of a Pod."""
        return f"{self.name}-{index}"


@dataclass(frozen=True, slots=True)
class PodState:
    """The state of a Pod."""

    ip: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = True


def pool_document(
    plan: PoolPlan, ports: Sequence[int] | None = None, labels: Mapping[str, str] | None = None
) -> Document:
    """The InferencePool, with other ports or another selector where these are given."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": plan.name},
        "spec": {
            "selector": {"matchLabels": dict(plan.labels if labels is None else labels)},
            "targetPorts": [{"number": port} for port in (plan.ports if ports is None else ports)],
            "appProtocol": "kubernetes.io/h2c" if plan.is_h2c else "http",
            "endpointPickerRef": {
                "name": f"{plan.name}-endpoint-picker-svc",
                "port": {"number": 9002},
                "failureMode": "FailOpen" if plan.is_open else "FailClose",
            },
        },
    }


def pod_document(name: str, labels: Mapping[str, str], is_held: bool = False) -> Document:
    """A Pod that no scheduler takes, so that its status is the suite's to write.

    One that is held stays, terminating, when it is deleted, until its finalizer is taken away.
    """
    metadata: Document = {"name": name, "labels": dict(labels)}
    if is_held:
        metadata["finalizers"] = [FINALIZER]
    container = {"name": "server", "image": "conformance.example/echo:1"}
    spec = {"containers": [container], "schedulerName": "conformance.example"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def pod_status(ip: str, is_ready: bool = True) -> Document:
    """The status of a Pod that runs, as a kubelet writes it."""
    word = "True" if is_ready else "False"
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [
        {"type": kind, "status": word if kind in ("ContainersReady", "Ready") else "True"}
        for kind in kinds
    ]
    return {
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "hostIP": "127.0.0.1",
            "conditions": conditions,
        }
    }
