"""Event streams of a real kubelet, replayed into the fake server step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.server import KubeApi
from tests.fakes.kube_api.store import Type


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    type: Type
    obj: Object


@dataclass(frozen=True, slots=True)
class Recording:
    steps: tuple[Step, ...]

    @classmethod
    def load(cls, path: Path) -> Recording:
        lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        return cls(tuple(Step(one["t"], Type(one["type"]), one["object"]) for one in lines))

    def met_midway(self) -> list[Object]:
        """Return the objects that existed before the recording began; they must have been Ready."""
        seen: set[str] = set()
        earlier = []
        for step in self.steps:
            uid = step.obj["metadata"]["uid"]
            if uid not in seen and step.type is not Type.ADDED:
                earlier.append(_ready(step.obj))
            seen.add(uid)
        return earlier


def _ready(pod: Object) -> Object:
    pod = copy.deepcopy(pod)
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "Ready":
            condition["status"] = "True"
    return pod


def replay(api: KubeApi, recording: Recording) -> Iterator[Step]:
    """Write one step at a time and yield it, after the objects from before the recording."""
    for pod in recording.met_midway():
        api.write(pod)
    for step in recording.steps:
        if step.type is Type.DELETED:
            metadata = step.obj["metadata"]
            api.erase("pods", metadata["name"], metadata["namespace"])
        else:
            api.write(step.obj, even_if_same=True)  # recorded without its managed fields
        yield step
