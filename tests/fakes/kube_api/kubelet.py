"""A node of the fake cluster: its Pods start, flap, move, restart, and end after a deletion.

The states that it writes are those of a recorded kubelet.
"""

import copy
from typing import Any

from tests.fakes.kube_api.clock import stamp
from tests.fakes.kube_api.objects import DeleteOptions
from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.server import KubeApi
from tests.fakes.kube_api.store import Change, Type


def pod(
    name: str,
    ip: str | None,
    labels: dict[str, str],
    *,
    ready: bool = True,
    namespace: str = "default",
    grace_seconds: int = 30,
) -> Object:
    running = ip is not None
    status: Object = {
        "phase": "Running" if running else "Pending",
        "conditions": [{"type": "Ready", "status": str(ready and running)}],
        "containerStatuses": [{"name": "server", "ready": ready, "restartCount": 0}],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    containers = [{"name": "server", "image": "server:1"}]
    spec = {
        "nodeName": "node1",
        "containers": containers,
        "terminationGracePeriodSeconds": grace_seconds,
    }
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


class Kubelet:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._ending: set[str] = set()
        self._pods = api.resource("pods")
        api.store.listen(self._pods, self._seen)

    def run(self, name: str, ip: str | None, labels: dict[str, str], **how: Any) -> Object:
        return self._api.write(pod(name, ip, labels, **how)).obj

    def set_ready(self, name: str, ready: bool, namespace: str = "default") -> None:
        found = copy.deepcopy(self._api.read("pods", name, namespace))
        _mark(found, ready)
        self._api.write(found)

    def move(self, name: str, ip: str, namespace: str = "default") -> None:
        found = copy.deepcopy(self._api.read("pods", name, namespace))
        found["status"] |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        self._api.write(found)

    def restart_container(self, name: str, namespace: str = "default") -> None:
        found = copy.deepcopy(self._api.read("pods", name, namespace))
        _mark(found, False)
        container = found["status"]["containerStatuses"][0]
        container["state"] = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
        self._api.write(found)
        found = copy.deepcopy(self._api.read("pods", name, namespace))
        container = found["status"]["containerStatuses"][0]
        container["restartCount"] += 1
        container["state"] = {"running": {"startedAt": stamp(self._api.clock.now())}}
        self._api.write(found)

    def delete(self, name: str, namespace: str = "default") -> None:
        self._api.objects.delete(self._pods, (namespace, name), DeleteOptions())

    def _seen(self, change: Change) -> None:
        metadata = change.new.obj["metadata"]
        uid, grace = metadata["uid"], metadata.get("deletionGracePeriodSeconds")
        if change.type is Type.DELETED:
            self._ending.discard(uid)
        elif grace and uid not in self._ending:
            self._ending.add(uid)
            key = (metadata["namespace"], metadata["name"])
            self._api.clock.call_later(grace, lambda: self._end(key, uid))

    def _end(self, key: tuple[str, str], uid: str) -> None:
        found = self._api.store.find(self._pods, key)
        if found is None or found.obj["metadata"]["uid"] != uid:
            return
        ended = copy.deepcopy(found.obj)
        ended["status"]["phase"] = "Succeeded"
        _mark(ended, False)
        self._api.write(ended)
        self._api.objects.delete(self._pods, key, DeleteOptions(grace_seconds=0))


def _mark(found: Object, ready: bool) -> None:
    for condition in found["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition["status"] = str(ready)
    for container in found["status"]["containerStatuses"]:
        container["ready"] = ready
