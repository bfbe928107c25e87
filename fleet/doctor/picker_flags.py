"""Which pools a picker serves and where, as far as the Pod that it runs in states its flags."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace

from fleet.doctor.cluster_facts import Json
from fleet.doctor.cluster_view import flag_in, variables_of, words_of
from fleet.doctor.envoy_document import at, listed, number
from picker.cli.options import PoolFlags
from picker.cli.pools import pool_flags
from picker.cli.readers import checked
from picker.k8s.lease import LeaseName

PEER_FLAGS = ("--peers", "--peer-service", "--peer-slices")
_GRPC_PORT = 9002
_UNKNOWN = "$("


@dataclass(frozen=True, slots=True)
class Serving:
    """The pools of one picker, each with its namespace; `port` is the common one, None where it
    is not known. `namespace` is where the Lease is, and replicas that EndpointSlices name.
    """

    namespace: str
    pools: tuple[PoolFlags, ...]
    port: int | None

    @property
    def lease(self) -> LeaseName | None:
        """The one that is kept with an election: it is called after the first pool."""
        first = next((one.name for one in self.pools if one.endpoints_file is None), None)
        if first is None:
            return None
        return LeaseName(self.namespace, f"epp-{self.namespace}-{first}.llm-d.ai")

    def find(self, namespace: str, name: str) -> PoolFlags | None:
        """The pool, None: it is not served."""
        return next(
            (one for one in self.pools if (one.namespace, one.name) == (namespace, name)), None
        )


def serving_of(pod: Json) -> Serving | None:
    """What a picker's Pod says that it serves; None where it does not say, or not all of it."""
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
            return Serving(namespace, placed, _GRPC_PORT if port is None else number(port))
    return None


def _pools(words: list[str]) -> tuple[PoolFlags, ...] | None:
    """Those that a command line names, None: it cannot be understood."""
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
    read = checked(pool_flags)
    parser.add_argument("--pool", dest="pools", type=read, action="append", default=[])
    return parser


def _namespace(pod: Json, container: Json, words: list[str]) -> str:
    """Where pools are that name no namespace."""
    given = flag_in(words, "--pool-namespace") or variables_of(pod, container).get("NAMESPACE")
    return given or str(at(pod, "metadata", "namespace") or "default")
