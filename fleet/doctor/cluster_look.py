"""Looks at a cluster through the picker's own client. Nothing is written but access reviews."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from fleet.doctor.cluster_facts import (
    ACCESS_REVIEWS,
    TOKEN_REVIEWS,
    ClusterFacts,
    Json,
    Right,
)
from fleet.doctor.cluster_view import flag_of, is_election_on, is_on, picker_pods, pool_value
from fleet.doctor.envoy_document import at
from fleet.doctor.picker_flags import serving_of
from fleet.doctor.web import NO_JSON
from picker.k8s.api import (
    ENDPOINT_SLICES,
    LEASES,
    LEGACY_OBJECTIVES,
    LEGACY_POOLS,
    LEGACY_REWRITES,
    OBJECTIVES,
    PODS,
    POOLS,
    REWRITES,
    ApiError,
    ApiResource,
    KubernetesApi,
    Selection,
    UnreachableError,
)
from picker.k8s.lease import LeaseName

SERVICES = ApiResource("", "v1", "services")
_KINDS = (POOLS, LEGACY_POOLS, OBJECTIVES, LEGACY_OBJECTIVES, REWRITES, LEGACY_REWRITES)
_POLICIES = ((OBJECTIVES, LEGACY_OBJECTIVES), (REWRITES, LEGACY_REWRITES))
_KIND_NAMES = {
    POOLS.plural: "InferencePool",
    OBJECTIVES.plural: "InferenceObjective",
    REWRITES.plural: "InferenceModelRewrite",
    PODS.plural: "Pod",
    ENDPOINT_SLICES.plural: "EndpointSlice",
}
_REVIEWS = "/apis/authorization.k8s.io/v1/"
_NOT_FOUND, _FORBIDDEN = 404, 403
LOOK_SECONDS = 60.0  # some thirty questions, one after the other


class ClusterLook:
    """One look at a pool. `user` is whose rights are asked for, None: the picker's own, if its
    Pods are found, else those of whoever asks. `now` is in seconds since 1970; all of it may take
    `seconds`.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        pool_name: str,
        user: str | None,
        now: Callable[[], float],
        seconds: float = LOOK_SECONDS,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._pool_name = pool_name
        self._user = user
        self._now = now
        self._seconds = seconds
        self._unseen: dict[str, str] = {}

    async def look(self) -> ClusterFacts:
        """Everything there is to judge."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._look()
        except TimeoutError:
            problem = f"it did not answer all that was asked within {self._seconds:g} s"
            return ClusterFacts(self._namespace, self._pool_name, problem=problem)
        except (ApiError, UnreachableError) as error:
            problem = str(error).rstrip(": ")
            return ClusterFacts(self._namespace, self._pool_name, problem=problem)

    async def _look(self) -> ClusterFacts:
        served = {one: await self._api.has(one) for one in _KINDS}
        kind = POOLS if served[POOLS] or not served[LEGACY_POOLS] else LEGACY_POOLS
        pool = await self._pool(kind) if served[kind] else None
        so_far = ClusterFacts(self._namespace, self._pool_name, pool=pool)
        value = pool_value(so_far)
        reference = None if value is None else value.picker
        service, slices = None, None
        if reference is not None and reference.kind == "Service":
            service = await self._get(SERVICES, reference.name)
            owned = f"kubernetes.io/service-name={reference.name}"
            slices = await self._list(ENDPOINT_SLICES, Selection(self._namespace, owned))
        pods = await self._list(PODS)
        so_far = ClusterFacts(
            self._namespace, self._pool_name, pool=pool, service=service, pods=pods
        )
        lease = lease_of(so_far)
        rights = tuple(_needed(served, kind, so_far, lease))
        who, denied, problem = await self._denied(rights, self._user or _account(so_far))
        return ClusterFacts(
            namespace=self._namespace,
            pool_name=self._pool_name,
            unseen=self._unseen,
            who=who,
            denied=denied,
            rights_problem=problem,
            served=served,
            pool=pool,
            pods=pods,
            service=service,
            slices=slices,
            policies=await self._policies(served),
            lease=await self._lease(lease),
            lease_name=lease,
            now=self._now(),
        )

    async def _pool(self, kind: ApiResource) -> Json | None:
        """Listed by its name, as the picker does, whose Role has no more than that."""
        selection = Selection(self._namespace, field_selector=f"metadata.name={self._pool_name}")
        return next(iter(await self._list(kind, selection) or ()), None)

    async def _lease(self, lease: LeaseName | None) -> Json | None:
        return None if lease is None else await self._get(LEASES, lease.name, lease.namespace)

    async def _get(self, resource: ApiResource, name: str, namespace: str = "") -> Json | None:
        asked = self._api.get(resource, namespace or self._namespace, name)
        found: Json | None = await self._seen(resource, asked)
        return found

    async def _list(
        self, resource: ApiResource, selection: Selection | None = None
    ) -> tuple[Json, ...] | None:
        """Those selected; all of the namespace without a selection."""
        selection = selection or Selection(self._namespace)
        listing = await self._seen(resource, self._api.list(resource, selection))
        if listing is None:
            return None
        kind = {"apiVersion": resource.api_version, "kind": _KIND_NAMES[resource.plural]}
        # Lists leave out of their items what all of them are.
        try:
            return tuple(kind | msgspec.json.decode(one, type=dict) for one in listing.items)
        except NO_JSON as error:
            raise UnreachableError(f"a list of {resource.plural} holds no objects") from error

    async def _seen(self, resource: ApiResource, asked: Awaitable[Any]) -> Any:
        """The answer; None when there is none, which is remembered if it may not be had."""
        try:
            return await asked
        except ApiError as error:
            if error.status != _NOT_FOUND:
                self._unseen[resource.plural] = str(error)
            return None

    async def _policies(self, served: dict[ApiResource, bool]) -> tuple[Json, ...]:
        found: list[Json] = []
        for pair in _POLICIES:
            kind = next((one for one in pair if served[one]), None)
            if kind is not None:
                found += await self._list(kind) or ()
        return tuple(found)

    async def _denied(
        self, rights: tuple[Right, ...], user: str | None
    ) -> tuple[str, tuple[Right, ...], str | None]:
        """Who was asked about, what is missing, and why nobody could tell."""
        try:
            if user is not None:
                return user, await self._missing(rights, user), None
        except ApiError as error:
            if self._user is not None or error.status != _FORBIDDEN:
                return user or "you", (), str(error)
        try:
            return "you", await self._missing(rights, None), None
        except ApiError as error:
            return "you", (), str(error)

    async def _missing(self, rights: tuple[Right, ...], user: str | None) -> tuple[Right, ...]:
        return tuple([one for one in rights if not await self._may(one, user)])

    async def _may(self, right: Right, user: str | None) -> bool:
        attributes = {
            **({"namespace": right.namespace} if right.namespace else {}),
            "verb": right.verb,
            "group": right.resource.group,
            "version": right.resource.version,
            "resource": right.resource.plural,
            **({"name": right.name} if right.name else {}),
        }
        spec: Json = {"resourceAttributes": attributes}
        kind = "SelfSubjectAccessReview"
        if user is not None:
            kind = "SubjectAccessReview"
            spec |= {"user": user, "groups": _groups(user)}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        answer = await self._api.post(f"{_REVIEWS}{kind.lower()}s", review)
        return at(answer, "status", "allowed") is True


def lease_of(cluster: ClusterFacts) -> LeaseName | None:
    """The Lease that the picker's Pods elect by; None: they do not elect."""
    electing = [one for one in picker_pods(cluster) if is_election_on(one)]
    if not electing:
        return None
    told = (serving.lease for one in electing if (serving := serving_of(one)) is not None)
    space, pool = cluster.namespace, cluster.pool_name
    return next(filter(None, told), LeaseName(space, f"epp-{space}-{pool}.llm-d.ai"))


def _needed(
    served: dict[ApiResource, bool],
    pools: ApiResource,
    cluster: ClusterFacts,
    lease: LeaseName | None,
) -> Iterator[Right]:
    """What a picker does. Kinds that are not there need no rights yet."""
    space = cluster.namespace
    yield from (Right(PODS, verb, space) for verb in ("list", "watch"))
    yield from (Right(pools, verb, space, cluster.pool_name) for verb in ("list", "watch"))
    for pair in _POLICIES:
        kind = next((one for one in pair if served[one]), None)
        if kind is not None:
            yield from (Right(kind, verb, space) for verb in ("list", "watch"))
    if lease is not None:
        yield from (Right(LEASES, verb, lease.namespace, lease.name) for verb in ("get", "update"))
        yield Right(LEASES, "create", lease.namespace)
    pickers = picker_pods(cluster)
    following = next((one for one in pickers if flag_of(one, "--peer-slices")), None)
    if following is not None:
        serving = serving_of(following)
        at_home = space if serving is None else serving.namespace
        yield from (Right(ENDPOINT_SLICES, verb, at_home) for verb in ("list", "watch"))
    if any(is_on(one, "--metrics-endpoint-auth") for one in pickers):
        yield from (Right(kind, "create", "") for kind in (TOKEN_REVIEWS, ACCESS_REVIEWS))


def _account(cluster: ClusterFacts) -> str | None:
    """Who the picker's Pods are to the API server."""
    for pod in picker_pods(cluster):
        name = at(pod, "spec", "serviceAccountName") or "default"
        return f"system:serviceaccount:{cluster.namespace}:{name}"
    return None


def _groups(user: str) -> list[str]:
    """The groups that the API server puts a service account in."""
    kind, _, account = user.partition("system:serviceaccount:")
    if kind or not account:
        return ["system:authenticated"]
    namespace = account.partition(":")[0]
    everybody = ["system:authenticated", "system:serviceaccounts"]
    return [*everybody, f"system:serviceaccounts:{namespace}"]
