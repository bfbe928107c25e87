"""The Lease of leader election: sends the requests that `Elector` decides on.

Call `LeaseKeeper.is_leader` each time: it reads the clock, so a suspended process or an unreachable
API server ends leadership in time.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Final, TypeAlias

from base.backoff import Backoff
from picker.k8s.api import LEASES, ApiError, KubernetesApi, UnreachableError
from picker.k8s.elector import Elector, LeaseName, LeaseRecord, Step, Timings
from picker.metrics.picker_metrics import ElectionSeries

log = logging.getLogger(__name__)

RELEASE_SECONDS: Final = 2.0  # to release the Lease; after that it expires by itself
_RELEASE_TRIES: Final = 3
_JITTER: Final = (0.8, 1.0)
_LAST_TICK: Final = timedelta(microseconds=1)
_CONFLICT, _NOT_FOUND, _FORBIDDEN = 409, 404, 403

Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[KubernetesApi]]


@dataclass(frozen=True, slots=True)
class Clocks:
    """`steady` is a clock in seconds that never stops or jumps; `wall` is for display."""

    steady: Callable[[], float]
    wall: Callable[[], datetime]


class LeaseKeeper:
    """Owns one replica's part in the election; `connect` connects to the API server."""

    def __init__(
        self,
        connect: Connect,
        lease: LeaseName,
        identity: str,
        timings: Timings,
        series: ElectionSeries,
        *,
        clocks: Clocks,
        rng: Random,
    ) -> None:
        self._connect, self._lease, self._identity = connect, lease, identity
        self._timings, self._clocks, self._rng = timings, clocks, rng
        self._elector = Elector(identity, timings)
        self._backoff = Backoff(rng, timings.retry_seconds)
        self._series = series.of(lease.name)
        self._document: dict[str, Any] = {}
        self._resigned, self._led = asyncio.Event(), asyncio.Event()
        self._was_leader = False
        self._problems: dict[bool, str] = {}  # of reads (True) and of writes
        self._wrote_at = datetime.min.replace(tzinfo=UTC)

    def is_leader(self) -> bool:
        return not self._resigned.is_set() and self._elector.is_leader(self._clocks.steady())

    @property
    def holder(self) -> str:
        return self._elector.holder

    def problem(self) -> str | None:
        """Return why this replica cannot lead, with a fix if there is one."""
        return next(iter(self._problems.values()), None)

    async def led(self) -> None:
        """Wait until this replica has become the leader once."""
        await self._led.wait()

    def resign(self) -> None:
        self._resigned.set()

    async def run(self) -> None:
        """Take part in the election until `resign` or cancellation; then release the Lease."""
        with self._series.shown(self.is_leader):
            async with self._connect() as api, asyncio.TaskGroup() as group:
                campaign = group.create_task(self._campaign(api), name="election")
                try:
                    await self._resigned.wait()
                finally:
                    self._elector.stand_down()
                    self._log_change()
                    campaign.cancel()
                    await asyncio.wait([campaign])
                    await self._release(api)

    async def _campaign(self, api: KubernetesApi) -> None:
        while True:
            wait = await self._try(api)
            self._log_change()
            now, until = self._clocks.steady(), self._elector.leads_until
            if until is not None and now < until <= now + wait:
                await asyncio.sleep(until - now)  # so that the end of leadership is logged in time
                self._log_change()
                wait -= until - now
            await asyncio.sleep(wait)

    async def _try(self, api: KubernetesApi) -> float:
        step = self._elector.step(self._clocks.steady())
        try:
            async with asyncio.timeout(self._timings.answer_seconds):
                await self._take(step, api)
        except (ApiError, UnreachableError, TimeoutError) as error:
            return self._failed(step, error)
        self._clear_problems(step)
        return self._elector.wait_seconds(self._clocks.steady(), self._rng.uniform(*_JITTER))

    def _clear_problems(self, step: Step) -> None:
        """Clear the problems; a read that leads to a write clears only those of reads."""
        now = self._clocks.steady()
        if step is Step.LOOK and self._elector.step(now) is not Step.LOOK:
            self._problems.pop(True, None)
            return
        self._problems.clear()
        self._backoff.reset()

    async def _take(self, step: Step, api: KubernetesApi) -> None:
        if step is Step.LOOK:
            await self._look(api)
            return
        asked_at = self._clocks.steady()
        self._elector.lost_track()  # until the answer arrives
        stored = await self._write(api, step)
        record, self._document = record_of(stored), stored
        if record.holder == self._identity:
            self._elector.wrote(record, asked_at)
            self._series.renewed(self._clocks.steady)
        else:
            self._elector.saw(record, self._clocks.steady())

    async def _look(self, api: KubernetesApi) -> None:
        try:
            found = await api.get(LEASES, self._lease.namespace, self._lease.name)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            self._document = {}
            self._elector.saw_none(self._clocks.steady())
            return
        self._document = found
        self._elector.saw(record_of(found), self._clocks.steady())

    async def _write(self, api: KubernetesApi, step: Step) -> dict[str, Any]:
        namespace, name = self._lease.namespace, self._lease.name
        if step is Step.CREATE:
            metadata = {"name": name, "namespace": namespace}
            made = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata}
            return await api.send("POST", LEASES.path(namespace), {**made, "spec": self._spec({})})
        # With the resourceVersion that was read, so that the server refuses an outdated write.
        return await self._replace(api, self._spec(self._document))

    async def _replace(self, api: KubernetesApi, spec: dict[str, Any]) -> dict[str, Any]:
        path = LEASES.path(self._lease.namespace, self._lease.name)
        return await api.send("PUT", path, {**self._document, "spec": spec})

    def _spec(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the spec that names this replica."""
        known, before = _spec_of(document), record_of(document)
        # Replicas notice only a write that changes something, so the time always increases, by at
        # least the microsecond that the stored time has.
        self._wrote_at = max(self._clocks.wall(), self._wrote_at + _LAST_TICK)
        stamp = self._wrote_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_mine = before.holder == self._identity
        moves = before.transitions + (0 if is_mine or not document else 1)
        return {
            **known,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._timings.lease_seconds),
            "acquireTime": known.get("acquireTime", stamp) if is_mine else stamp,
            "renewTime": stamp,
            "leaseTransitions": moves,
        }

    async def _release(self, api: KubernetesApi) -> None:
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._release_now(api)
        except (ApiError, UnreachableError, TimeoutError) as error:
            seconds = f"{self._timings.lease_seconds:.0f} s"
            why = _said(error)
            log.warning(
                "lease %s was not released: %s; it expires in %s", self._lease, why, seconds
            )

    async def _release_now(self, api: KubernetesApi) -> None:
        for _ in range(_RELEASE_TRIES):
            if self._elector.is_outdated:
                await self._look(api)
            if not self._elector.holds:
                return
            # The API requires a duration of one second at least.
            spec = self._spec(self._document) | {"holderIdentity": "", "leaseDurationSeconds": 1}
            try:
                await self._replace(api, spec)
            except ApiError as error:
                if error.status != _CONFLICT:
                    raise
                self._elector.lost_track()
            else:
                log.info("released lease %s", self._lease)
                return

    def _failed(self, step: Step, error: ApiError | UnreachableError | TimeoutError) -> float:
        """Count a failure, and log a new one; return the wait."""
        status = error.status if isinstance(error, ApiError) else None
        self._series.count_error("unreachable" if status is None else str(status))
        if status != _CONFLICT:  # another replica was faster; the next read shows which
            problem, is_look = self._why(error), step is Step.LOOK
            if is_look not in self._problems:
                log.warning("%s", problem)
            self._problems[is_look] = problem
        asked = error.retry_after_seconds if isinstance(error, ApiError) else None
        longest = self._timings.retry_seconds
        # A longer wait than between two renewals would cost the lead.
        return self._backoff.next_seconds(None if asked is None else min(asked, longest))

    def _why(self, error: ApiError | UnreachableError | TimeoutError) -> str:
        name, namespace = self._lease.name, self._lease.namespace
        if not isinstance(error, ApiError) or error.status not in (_FORBIDDEN, _NOT_FOUND):
            return f"lease {self._lease} cannot be renewed: {_said(error)}"
        if error.status == _NOT_FOUND:
            return (
                f"lease {self._lease} cannot be made: is there a namespace {namespace!r}? {error}"
            )
        return (
            f"lease {self._lease} is forbidden; grant the picker's service account in namespace "
            f"{namespace!r} {{apiGroups: [{LEASES.group}], resources: [leases], resourceNames: "
            f"[{name}], verbs: [get, update]}} and {{apiGroups: [{LEASES.group}], resources: "
            f"[leases], verbs: [create]}}: {error.message}"
        )

    def _log_change(self) -> None:
        leads = self.is_leader()
        if leads == self._was_leader:
            return
        self._was_leader = leads
        self._series.count_change("gained" if leads else "lost")
        if leads:
            self._led.set()
            log.info("leading: holds lease %s as %s", self._lease, self._identity)
        elif not self._resigned.is_set():
            log.warning("no longer leads; lease %s is held by %r", self._lease, self.holder)


def record_of(document: dict[str, Any]) -> LeaseRecord:
    spec, metadata = _spec_of(document), document.get("metadata")
    holder, moves = spec.get("holderIdentity"), spec.get("leaseTransitions")
    seconds = spec.get("leaseDurationSeconds")
    if holder is None and spec.get("renewTime") is None:
        holder = ""
    return LeaseRecord(
        holder=holder if isinstance(holder, str) else None,
        mark=str(metadata.get("resourceVersion")) if isinstance(metadata, dict) else "",
        transitions=_whole(moves),
        stated_seconds=float(_whole(seconds)),
    )


def _spec_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document.get("spec")
    return spec if isinstance(spec, dict) else {}


def _whole(number: object) -> int:
    is_one = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    return int(number) if is_one and isinstance(number, int) else 0


def _said(error: BaseException) -> str:
    return str(error) or "no answer in time"
