"""Makes a small picker follow an InferencePool by asking again and again, rightly or wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import aiohttp
from mutant_epp import MutantEpp

from conformance.k8s.api import ApiRefusalError, KubeApi

EVERY_SECONDS = 0.03
HOLD_SECONDS = 1.0
_READY = {"type": "Ready", "status": "True"}


class Misreading(Enum):
    """What it gets wrong."""

    NONE = auto()
    READY_WITHOUT_POOL = auto()
    KEEPS_A_DELETED_POOL = auto()
    KEEPS_THE_FIRST_SELECTOR = auto()
    KEEPS_THE_FIRST_PORTS = auto()
    LOOKS_INTO_EVERY_NAMESPACE = auto()
    STOPS_AT_NONSENSE = auto()
    TAKES_WHAT_IS_NOT_READY = auto()
    TAKES_WHAT_WAS_NEVER_READY = auto()
    TAKES_WHAT_IS_LEAVING = auto()
    KEEPS_WHAT_IS_DELETED = auto()
    KEEPS_THE_FIRST_ADDRESS = auto()
    KEEPS_THE_FIRST_LABELS = auto()
    GOES_BY_ADDRESS = auto()
    EMPTIES_ON_A_FLAP = auto()
    EMPTIES_IN_AN_OUTAGE = auto()
    ENDS_WITH_AN_OUTAGE = auto()
    TAKES_PODS_OF_EVERY_POOL = auto()
    EMPTIES_WITH_ANY_POOL = auto()


class Follower:
    """Keeps the pool of one picker; owns what it remembers."""

    def __init__(self, api: KubeApi, namespace: str, pool: str, epp: MutantEpp) -> None:
        self._api, self._namespace, self._pool, self._epp = api, namespace, pool, epp
        self._was_ready: set[str] = set()
        self._looks = asyncio.Condition()
        self.be(Misreading.NONE)

    def be(self, wrong: Misreading) -> None:
        """Err in this way from now on, with no memory of another one."""
        self.wrong = wrong
        self._first: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}
        self._held_since: float | None = None
        self._has_ended = False

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if not self._has_ended:
                await self._look()
            async with self._looks:
                self._looks.notify_all()
            await asyncio.sleep(EVERY_SECONDS)

    async def looked(self) -> None:
        """Wait until it has looked twice, the second time from beginning to end."""
        async with self._looks:
            await self._looks.wait()
            await self._looks.wait()

    async def _look(self) -> None:
        try:
            pool = await self._api.read("InferencePool", self._pool, self._namespace)
            pods = [pod for space in self._spaces() for pod in await self._api.items("Pod", space)]
            pools = await self._api.items("InferencePool", self._namespace)
        except (aiohttp.ClientError, OSError):
            self._has_ended = self.wrong is Misreading.ENDS_WITH_AN_OUTAGE
            if self.wrong is Misreading.EMPTIES_IN_AN_OUTAGE:
                await self._epp.use_pool([])
            return
        except ApiRefusalError:
            return
        self._epp.is_ready = pool is not None or self.wrong is Misreading.READY_WITHOUT_POOL
        if pool is None:
            if self.wrong is not Misreading.KEEPS_A_DELETED_POOL:
                await self._epp.use_pool([])
            return
        most = self._first["pools"] = max(len(pools), self._first.get("pools", 0))
        if self.wrong is Misreading.EMPTIES_WITH_ANY_POOL and len(pools) < most:
            await self._epp.use_pool([])
            return
        await self._use(pool["spec"], pods)
        if self.wrong is Misreading.TAKES_PODS_OF_EVERY_POOL:
            await self._epp.use_pool([one for each in pools for one in _planned(each, pods)])

    def _spaces(self) -> list[str]:
        if self.wrong is Misreading.LOOKS_INTO_EVERY_NAMESPACE:
            return [self._namespace, f"{self._namespace}-other"]
        return [self._namespace]

    async def _use(self, spec: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        labels = spec["selector"]["matchLabels"]
        ports = [port["number"] for port in spec["targetPorts"]]
        if any(" " in key for key in labels):
            self._has_ended = self.wrong is Misreading.STOPS_AT_NONSENSE
            return
        if self.wrong is Misreading.KEEPS_THE_FIRST_SELECTOR:
            labels = self._first.setdefault("labels", labels)
        if self.wrong is Misreading.KEEPS_THE_FIRST_PORTS:
            ports = self._first.setdefault("ports", ports)
        if self.wrong is Misreading.KEEPS_WHAT_IS_DELETED:
            self._seen |= {pod["metadata"]["name"]: pod for pod in pods}
            pods = list(self._seen.values())
        if self.wrong is Misreading.GOES_BY_ADDRESS:
            pods = list(self._by_address(pods))
        found = [pod for pod in pods if self._serves(pod, labels)]
        if not found and pods and self._holds():
            return
        if found:
            self._held_since = None
        endpoints = {f"{self._address(pod)}:{port}" for pod in found for port in ports}
        await self._epp.use_pool(sorted(endpoints))

    def _by_address(self, pods: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """A Pod at an address is taken for the one that was there first."""
        for pod in pods:
            ip, name = (pod.get("status") or {}).get("podIP"), pod["metadata"]["name"]
            first = self._seen.setdefault(ip, pod) if ip else pod
            yield pod if first["metadata"]["name"] == name else first

    def _holds(self) -> bool:
        """All of them at once: the node's doing, for a moment."""
        now = asyncio.get_running_loop().time()
        if self._held_since is None:
            self._held_since = now
        wrong = self.wrong is Misreading.EMPTIES_ON_A_FLAP
        return not wrong and now - self._held_since < HOLD_SECONDS

    def _serves(self, pod: dict[str, Any], labels: dict[str, str]) -> bool:
        metadata, status, wrong = pod["metadata"], pod.get("status") or {}, self.wrong
        own = metadata.get("labels") or {}
        if wrong is Misreading.KEEPS_THE_FIRST_LABELS:
            own = self._first.setdefault(metadata["uid"], own)
        selected = all(own.get(key) == value for key, value in labels.items())
        leaving = "deletionTimestamp" in metadata and wrong is not Misreading.TAKES_WHAT_IS_LEAVING
        return selected and not leaving and "podIP" in status and self._is_ready(pod)

    def _is_ready(self, pod: dict[str, Any]) -> bool:
        conditions = pod["status"].get("conditions") or ()
        uid = pod["metadata"]["uid"]
        if _READY in conditions:
            self._was_ready.add(uid)
            return True
        if uid in self._was_ready:
            return self.wrong is Misreading.TAKES_WHAT_IS_NOT_READY
        return self.wrong is Misreading.TAKES_WHAT_WAS_NEVER_READY

    def _address(self, pod: dict[str, Any]) -> str:
        ip = str(pod["status"]["podIP"])
        if self.wrong is Misreading.KEEPS_THE_FIRST_ADDRESS:
            return str(self._first.setdefault(f"ip of {pod['metadata']['uid']}", ip))
        return ip


def _planned(pool: dict[str, Any], pods: list[dict[str, Any]]) -> Iterator[str]:
    """The endpoints of a pool of the suite, whose Pods are told by one label."""
    app = pool["spec"]["selector"]["matchLabels"]["app"]
    for pod in pods:
        is_ready = _READY in pod.get("status", {}).get("conditions", ())
        if is_ready and pod["metadata"]["labels"].get("app") == app:
            for port in pool["spec"]["targetPorts"]:
                yield f"{pod['status']['podIP']}:{port['number']}"
