"""Facts about a cluster, gathered by the picker's own client. Only access reviews are written."""

import argparse
import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from fleet.doctor.paths import Json, at, listed, mapped, number
from fleet.doctor.web import NO_JSON
from picker.cli.options import PoolFlags
from picker.cli.pools import pool_flags
from picker.cli.readers import DIALECT
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
from picker.k8s.elector import LeaseName
from picker.k8s.objects import Pool, read_pool

TOKEN_REVIEWS = ApiResource("authentication.k8s.io", "v1", "tokenreviews")
ACCESS_REVIEWS = ApiResource("authorization.k8s.io", "v1", "subjectaccessreviews")
SERVICES = ApiResource("", "v1", "services")
PEER_FLAGS = ("--peers", "--peer-service", "--peer-slices")
LOOK_SECONDS = 60.0  # some thirty requests, one after the other
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
_GRPC_PORT = 9002  # the picker's default
_ELECTION = "--ha-enable-leader-election"
_ON = ("", "true", "1", "t", "yes")
_VARIABLE = re.compile(r"\$\(([^()]+)\)")
_UNKNOWN = "$("


@dataclass(frozen=True, slots=True)
class Right:
    """An action; `name` "" means any object, `namespace` "" is for kinds without namespaces."""

    resource: ApiResource
    verb: str
    namespace: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A pool's namespace and its objects, as the API server sent them.

    `problem` is why the API server was not reached. `unseen` are kinds that could not be read, with
    the reason. `who` is the account whose rights were checked, `denied` the rights that it lacks,
    `rights_problem` why they are not known. `served` maps kinds to whether the server has them.
    `lease` is that of the election. `now` is in seconds since 1970.
    """

    namespace: str
    pool_name: str
    problem: str | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)
    who: str = "you"
    denied: tuple[Right, ...] = ()
    rights_problem: str | None = None
    served: Mapping[ApiResource, bool] = field(default_factory=dict)
    pool: Json | None = None
    pods: tuple[Json, ...] | None = None
    service: Json | None = None
    slices: tuple[Json, ...] | None = None
    policies: tuple[Json, ...] = ()
    lease: Json | None = None
    lease_name: LeaseName | None = None
    now: float = 0.0


def failure_mode(cluster: ClusterFacts | None) -> str | None:
    if cluster is None or cluster.pool is None:
        return None
    spec = cluster.pool.get("spec")
    reference = at(spec, "endpointPickerRef") or at(spec, "extensionRef")
    return str(at(reference, "failureMode") or "FailClose")  # the API's default


def pool_value(cluster: ClusterFacts) -> Pool | None:
    """Read the pool; return None if there is none, or if it is invalid."""
    return None if cluster.pool is None else read_pool(cluster.pool).value


def pool_pods(cluster: ClusterFacts) -> tuple[Json, ...]:
    pool = pool_value(cluster)
    if pool is None:
        return ()
    return tuple(
        one for one in cluster.pods or () if pool.selects(mapped(one, "metadata", "labels"))
    )


def picker_pods(cluster: ClusterFacts) -> tuple[Json, ...]:
    selector = mapped(cluster.service, "spec", "selector")
    if not selector:
        return ()
    return tuple(
        one
        for one in cluster.pods or ()
        if all(
            mapped(one, "metadata", "labels").get(key) == value for key, value in selector.items()
        )
    )


def is_ready(pod: Json) -> bool:
    # A Pod that ends is Ready until its containers have stopped.
    if at(pod, "metadata", "deletionTimestamp") is not None:
        return False
    conditions = listed(pod, "status", "conditions")
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def words_of(pod: Json, container: Json) -> list[str]:
    """Return a container's command line; `$(NAME)` stays if its value comes from elsewhere."""
    known = variables_of(pod, container)
    parts = [at(container, key) for key in ("command", "args")]
    words = [str(one) for part in parts if isinstance(part, list) for one in part]
    return [_VARIABLE.sub(lambda found: known.get(found[1], found[0]), one) for one in words]


def variables_of(pod: Json, container: Json) -> dict[str, str]:
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
    """Return the value of a flag in any container, "" for a flag without a value."""
    for container in listed(pod, "spec", "containers"):
        found = flag_in(words_of(pod, container), name)
        if found is not None:
            return found
    return None


def flag_in(words: list[str], name: str) -> str | None:
    """Return the value of a flag, written `--name=value`, `--name value` or `--name`."""
    for place, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            after = next(iter(words[place + 1 : place + 2]), "")
            return "" if after.startswith("-") else after
    return None


def is_on(pod: Json, switch: str = _ELECTION) -> bool:
    found = flag_of(pod, switch)
    return found is not None and found.lower() in _ON


@dataclass(frozen=True, slots=True)
class ServedPools:
    """Pools of a picker. All have `port`; `namespace` is that of the Lease and replicas' slices."""

    namespace: str
    pools: tuple[PoolFlags, ...]
    port: int | None

    @property
    def lease(self) -> LeaseName | None:
        first = next((one.name for one in self.pools if one.endpoints_file is None), None)
        return None if first is None else _lease_name(self.namespace, first)

    def find(self, namespace: str, name: str) -> PoolFlags | None:
        return next(
            (one for one in self.pools if (one.namespace, one.name) == (namespace, name)), None
        )


def _lease_name(namespace: str, pool: str) -> LeaseName:
    return LeaseName(namespace, f"epp-{namespace}-{pool}.llm-d.ai")


def serving_of(pod: Json) -> ServedPools | None:
    """Return the pools that a picker's Pod says it serves; None if it names none, or not all."""
    for container in listed(pod, "spec", "containers"):
        words = words_of(pod, container)
        pools = _pools(words)
        if pools is None:
            return None
        if pools:
            namespace = _namespace(pod, container, words)
            named = (*(one.name for one in pools), *(one.namespace for one in pools), namespace)
            if any(_UNKNOWN in one for one in named):
                return None
            placed = tuple(replace(one, namespace=one.namespace or namespace) for one in pools)
            port = flag_in(words, "--grpc-port")
            return ServedPools(namespace, placed, _GRPC_PORT if port is None else number(port))
    return None


def _pools(words: list[str]) -> tuple[PoolFlags, ...] | None:
    try:
        several: list[PoolFlags] = _parser().parse_known_args(words)[0].pools
    except argparse.ArgumentError:
        return None
    if several:
        return tuple(several)
    name = flag_in(words, "--pool-name")
    return (PoolFlags(name=name),) if name else ()


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    read = DIALECT.checked(pool_flags)
    parser.add_argument("--pool", dest="pools", type=read, action="append", default=[])
    return parser


def _namespace(pod: Json, container: Json, words: list[str]) -> str:
    given = flag_in(words, "--pool-namespace") or variables_of(pod, container).get("NAMESPACE")
    return given or str(at(pod, "metadata", "namespace") or "default")


class ClusterLook:
    """Looks at a pool once, and at the rights of `user`; if None, of the account of the picker's
    Pods or, if none are found, of the account that asks.
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
        self._nothing = ClusterFacts(namespace, pool_name)
        self._namespace = namespace
        self._pool_name = pool_name
        self._user = user
        self._now = now
        self._seconds = seconds
        self._unseen: dict[str, str] = {}

    async def look(self) -> ClusterFacts:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._look()
        except TimeoutError:
            problem = f"it did not answer all that was asked within {self._seconds:g} s"
        except (ApiError, UnreachableError) as error:
            problem = str(error).rstrip(": ")
        return replace(self._nothing, problem=problem)

    async def _look(self) -> ClusterFacts:
        served = {one: await self._api.has(one) for one in _KINDS}
        kind = POOLS if served[POOLS] or not served[LEGACY_POOLS] else LEGACY_POOLS
        found = replace(self._nothing, unseen=self._unseen, served=served)
        if served[kind]:
            found = replace(found, pool=await self._pool(kind))
        value = pool_value(found)
        reference = None if value is None else value.picker
        if reference is not None and reference.kind == "Service":
            owned = f"kubernetes.io/service-name={reference.name}"
            found = replace(
                found,
                service=await self._get(SERVICES, reference.name),
                slices=await self._list(ENDPOINT_SLICES, Selection(self._namespace, owned)),
            )
        found = replace(found, pods=await self._list(PODS))
        lease = lease_of(found)
        rights = tuple(_needed(kind, found, lease))
        who, denied, problem = await self._denied(rights, self._user or _account(found))
        return replace(
            found,
            who=who,
            denied=denied,
            rights_problem=problem,
            policies=await self._policies(served),
            lease=await self._get(LEASES, lease.name, lease.namespace) if lease else None,
            lease_name=lease,
            now=self._now(),
        )

    async def _pool(self, kind: ApiResource) -> Json | None:
        """Find the object by listing, as the picker does, whose Role permits no more than that."""
        selection = Selection(self._namespace, field_selector=f"metadata.name={self._pool_name}")
        return next(iter(await self._list(kind, selection) or ()), None)

    async def _get(self, resource: ApiResource, name: str, namespace: str = "") -> Json | None:
        asked = self._api.get(resource, namespace or self._namespace, name)
        found: Json | None = await self._seen(resource, asked)
        return found

    async def _list(
        self, resource: ApiResource, selection: Selection | None = None
    ) -> tuple[Json, ...] | None:
        selection = selection or Selection(self._namespace)
        listing = await self._seen(resource, self._api.list(resource, selection))
        if listing is None:
            return None
        kind = {"apiVersion": resource.api_version, "kind": _KIND_NAMES[resource.plural]}
        # Items of lists have no kind and version.
        try:
            return tuple(kind | msgspec.json.decode(one, type=dict) for one in listing.items)
        except NO_JSON as error:
            raise UnreachableError(f"a list of {resource.plural} holds no objects") from error

    async def _seen(self, resource: ApiResource, asked: Awaitable[Any]) -> Any:
        """Return the answer; if there is none, store why, unless it is a 404, and return None."""
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
        try:
            if user is not None:
                return user, await self._missing(rights, user), None
        except ApiError as error:
            if self._user is not None or error.status != _FORBIDDEN:
                return user or "you", (), str(error)
        try:
            # Any account may review itself.
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
        answer = await self._api.send("POST", f"{_REVIEWS}{kind.lower()}s", review)
        return at(answer, "status", "allowed") is True


def lease_of(cluster: ClusterFacts) -> LeaseName | None:
    electing = [one for one in picker_pods(cluster) if is_on(one)]
    if not electing:
        return None
    named = (serving.lease for one in electing if (serving := serving_of(one)) is not None)
    return next(filter(None, named), _lease_name(cluster.namespace, cluster.pool_name))


def _needed(pools: ApiResource, cluster: ClusterFacts, lease: LeaseName | None) -> Iterator[Right]:
    """Yield the rights that a picker needs; kinds that do not exist need none yet."""
    space = cluster.namespace
    yield from (Right(PODS, verb, space) for verb in ("list", "watch"))
    yield from (Right(pools, verb, space, cluster.pool_name) for verb in ("list", "watch"))
    for pair in _POLICIES:
        kind = next((one for one in pair if cluster.served[one]), None)
        if kind is not None:
            yield from (Right(kind, verb, space) for verb in ("list", "watch"))
    if lease is not None:
        yield from (Right(LEASES, verb, lease.namespace, lease.name) for verb in ("get", "update"))
        yield Right(LEASES, "create", lease.namespace)  # RBAC cannot restrict it to a name
    pickers = picker_pods(cluster)
    following = next((one for one in pickers if flag_of(one, "--peer-slices")), None)
    if following is not None:
        serving = serving_of(following)
        at_home = space if serving is None else serving.namespace
        yield from (Right(ENDPOINT_SLICES, verb, at_home) for verb in ("list", "watch"))
    if any(is_on(one, "--metrics-endpoint-auth") for one in pickers):
        yield from (Right(kind, "create", "") for kind in (TOKEN_REVIEWS, ACCESS_REVIEWS))


def _account(cluster: ClusterFacts) -> str | None:
    for pod in picker_pods(cluster):
        name = at(pod, "spec", "serviceAccountName") or "default"
        return f"system:serviceaccount:{cluster.namespace}:{name}"
    return None


def _groups(user: str) -> list[str]:
    kind, _, account = user.partition("system:serviceaccount:")
    if kind or not account:
        return ["system:authenticated"]
    namespace = account.partition(":")[0]
    # A review of another account knows only the groups that it states.
    groups = ["system:authenticated", "system:serviceaccounts"]
    return [*groups, f"system:serviceaccounts:{namespace}"]
