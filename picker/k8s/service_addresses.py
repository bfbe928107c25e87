"""The addresses of the Pods behind a Service, from its EndpointSlices.

Replicas report to every running Pod, so Pods that are not ready or are terminating count as well.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_address
from random import Random
from typing import Final, TypeAlias

import msgspec

from picker.k8s.api import ENDPOINT_SLICES, KubernetesApi, Selection
from picker.k8s.object_map import ObjectKey
from picker.k8s.reflector import Reflector, Subject
from picker.metrics.picker_metrics import KubernetesSeries

SERVICE_LABEL: Final = "kubernetes.io/service-name"
OpenApi: TypeAlias = Callable[[], AbstractAsyncContextManager[KubernetesApi]]
Addresses: TypeAlias = tuple[str, ...]


class _Endpoint(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...] = ()


class _Slice(msgspec.Struct, frozen=True):
    endpoints: tuple[_Endpoint, ...] | None = None


_SLICE = msgspec.json.Decoder(_Slice)


def slice_addresses(raw: msgspec.Raw) -> Addresses:
    """Return the IP addresses of one slice. Raises `msgspec.MsgspecError`."""
    # All addresses of an endpoint belong to one Pod. Slices of another type have host names.
    firsts = (one.addresses[0] for one in _SLICE.decode(raw).endpoints or () if one.addresses)
    return tuple(address for address in firsts if _is_ip(address))


async def follow_service(
    open_api: OpenApi,
    selection: Selection,
    found: Callable[[Sequence[str]], None],
    *,
    clock: Callable[[], float],
    rng: Random,
    series: KubernetesSeries | None = None,
) -> None:
    """Call `found` with a Service's sorted addresses after each change, until cancelled."""

    def notify(view: Mapping[ObjectKey, Addresses], _: Collection[ObjectKey]) -> None:
        found(sorted({address for one in view.values() for address in one}))

    async with open_api() as api:
        subject = Subject(ENDPOINT_SLICES, selection, slice_addresses)
        reflector = Reflector(api, subject, rng=rng, clock=clock, series=series)
        reflector.subscribe(notify)
        await reflector.run()


def of_service(namespace: str, name: str) -> Selection:
    return Selection(namespace, f"{SERVICE_LABEL}={name}")


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
