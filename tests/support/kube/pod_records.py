"""Pods as an API server sends them, and as the picker stores them."""

import json
from typing import Any

from picker.k8s.pods import PodRecord, read_pod

LABELS = {"app": "vllm"}


def pod_document(name: str, ip: str | None = "10.0.0.1", **how: Any) -> dict[str, Any]:
    containers = how.get("containers", {"server": {}})
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": how.get("uid", f"uid-{name}"),
        "creationTimestamp": how.get("created", "2026-01-01T00:00:00Z"),
        "labels": how.get("labels", LABELS),
        "annotations": how.get("annotations", {}),
    }
    if how.get("deleting"):
        metadata["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    spec = {
        "nodeName": how.get("node", "node1"),
        "hostNetwork": how.get("host_network", False),
        "containers": [
            {"name": one, "ports": [{"containerPort": port} for port in given.get("ports", ())]}
            for one, given in containers.items()
        ],
    }
    status: dict[str, Any] = {
        "phase": how.get("phase", "Running"),
        "hostIP": "192.168.0.1",
        "conditions": [{"type": "Ready", "status": str(how.get("ready", True))}],
        "containerStatuses": [
            {
                "name": one,
                "restartCount": given.get("restarts", 0),
                "containerID": f"containerd://{one}-{given.get('restarts', 0)}",
                "state": given.get("state", {"running": {"startedAt": "2026-01-01T00:00:01Z"}}),
            }
            for one, given in containers.items()
        ],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def record(name: str, ip: str | None = "10.0.0.1", **how: Any) -> PodRecord:
    return read_pod(json.dumps(pod_document(name, ip, **how)).encode())
