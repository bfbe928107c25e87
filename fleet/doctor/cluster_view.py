"""What facts of a cluster mean: which Pods are whose, and what they were started with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fleet.doctor.cluster_facts import ClusterFacts, Json
from fleet.doctor.envoy_document import at, listed, mapped
from picker.k8s.objects import Pool, read_pool

_ELECTION = "--ha-enable-leader-election"
_ON = ("", "true", "1", "t", "yes")
_VARIABLE = re.compile(r"\$\(([^()]+)\)")


def pool_value(cluster: ClusterFacts) -> Pool | None:
    """The pool; None when there is none, or it is invalid."""
    return None if cluster.pool is None else read_pool(cluster.pool).value


def pool_pods(cluster: ClusterFacts) -> tuple[Json, ...]:
    """The Pods that the pool selects."""
    pool = pool_value(cluster)
    if pool is None:
        return ()
    return tuple(one for one in cluster.pods or () if pool.selects(labels_of(one)))


def picker_pods(cluster: ClusterFacts) -> tuple[Json, ...]:
    """The Pods behind the picker's Service."""
    selector = mapped(cluster.service, "spec", "selector")
    if not selector:
        return ()
    return tuple(
        one
        for one in cluster.pods or ()
        if all(labels_of(one).get(key) == value for key, value in selector.items())
    )


def labels_of(pod: Json) -> dict[str, str]:
    """Its labels."""
    found = at(pod, "metadata", "labels")
    return found if isinstance(found, dict) else {}


def is_ready(pod: Json) -> bool:
    """Whether it may be sent requests."""
    if at(pod, "metadata", "deletionTimestamp") is not None:
        return False
    conditions = listed(pod, "status", "conditions")
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def words_of(pod: Json, container: Json) -> list[str]:
    """A container's command line, as far as the Pod states it; `$(NAME)` stays where the variable
    has its value from elsewhere.
    """
    known = variables_of(pod, container)
    parts = [at(container, key) for key in ("command", "args")]
    words = [str(one) for part in parts if isinstance(part, list) for one in part]
    return [_VARIABLE.sub(lambda found: known.get(found[1], found[0]), one) for one in words]


def variables_of(pod: Json, container: Json) -> dict[str, str]:
    """The container's environment, as far as the Pod states it."""
    found: dict[str, str] = {}
    for one in listed(container, "env"):
        field = at(one, "valueFrom", "fieldRef", "fieldPath")
        value = at(one, "value")
        if isinstance(field, str):
            value = at(pod, *field.split("."))
        if isinstance(value, str):
            found[str(at(one, "name"))] = value
    return found


def flag_of(pod: Json, name: str) -> str | None:
    """The value of a flag in any of its containers, "" for one that stands alone."""
    for container in listed(pod, "spec", "containers"):
        found = flag_in(words_of(pod, container), name)
        if found is not None:
            return found
    return None


def flag_in(words: list[str], name: str) -> str | None:
    """The value of a flag, written `--name=value`, `--name value` or `--name`."""
    for place, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            after = next(iter(words[place + 1 : place + 2]), "")
            return "" if after.startswith("-") else after
    return None


def is_election_on(pod: Json) -> bool:
    """Whether it is a picker that waits to lead."""
    return is_on(pod, _ELECTION)


def is_on(pod: Json, switch: str) -> bool:
    """Whether it was started with a switch that says yes."""
    found = flag_of(pod, switch)
    return found is not None and found.lower() in _ON


def every_container(pods: tuple[Json, ...]) -> Iterator[tuple[Json, Json]]:
    """Pod and container, one by one."""
    for pod in pods:
        for container in listed(pod, "spec", "containers"):
            yield pod, container
