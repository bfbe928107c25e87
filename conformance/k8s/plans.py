"""The pools of the suite: those of the upstream suite, and one whose object comes later."""

from collections.abc import Sequence

from conformance.gateway.bootstrap import Listener, PickerAt, PoolBehind, Route
from conformance.k8s.cases.upstream import PRIMARY_WEIGHT, SECONDARY_WEIGHT
from conformance.k8s.objects import PoolPlan
from conformance.k8s.scene import H2C, LATE, PARALLEL, PRIMARY, SECONDARY, of_several
from conformance.ports import free_ports

# Those that the picker of several serves.
SEVERAL = (PRIMARY, SECONDARY, PARALLEL)


def _addresses(network: int, count: int) -> list[str]:
    return [f"127.0.{network}.{at + 1}" for at in range(count)]


def plans() -> tuple[PoolPlan, ...]:
    """All pools, with free ports."""
    first, second, *parallel = free_ports(5, [*_addresses(1, 5), *_addresses(3, 3)])
    return (
        PoolPlan(
            PRIMARY, _addresses(1, 3), [first], spare=_addresses(1, 5)[3:], spare_ports=[second]
        ),
        PoolPlan(SECONDARY, _addresses(2, 3), free_ports(1, _addresses(2, 3)), is_open=True),
        PoolPlan(PARALLEL, _addresses(3, 3), parallel),
        PoolPlan(H2C, _addresses(4, 3), free_ports(1, _addresses(4, 3)), is_h2c=True),
        PoolPlan(LATE, _addresses(5, 1), free_ports(1, _addresses(5, 1)), has_object=False),
    )


def behind(plan: PoolPlan, picker: PickerAt) -> PoolBehind:
    """A pool as the gateway knows it.

    The gateway knows every address that the pool's Pods may ever have: who may serve is the
    picker's word alone, and what it gets wrong shows.
    """
    members = plan.endpoints if plan.is_open else plan.served
    return PoolBehind(plan.name, picker, members, is_open=plan.is_open, is_h2c=plan.is_h2c)


def behind_several(plan: PoolPlan, all_of_them: Sequence[PoolPlan], picker: PickerAt) -> PoolBehind:
    """A pool of the picker of several. The gateway knows the addresses of all these pools for it:
    that each gets its own is the picker's word.
    """
    members = [endpoint for one in all_of_them for endpoint in one.served]
    return PoolBehind(of_several(plan.name), picker, members)


def listeners(pools: Sequence[PoolPlan], several: Sequence[str] = ()) -> list[Listener]:
    """One gateway with a path for each pool and one that is split, and one of the second pool.

    `several` are the pools that have a path by way of the picker of several, too.
    """
    weights = {PRIMARY: PRIMARY_WEIGHT, SECONDARY: SECONDARY_WEIGHT}
    paths = [Route(f"/{plan.name}", {plan.name: 1}) for plan in pools if plan.name != LATE]
    paths += [Route(f"/{of_several(name)}", {of_several(name): 1}) for name in several]
    return [
        Listener("main", [*paths, Route("/weighted", weights)]),
        Listener("second", [Route("/", {SECONDARY: 1})]),
    ]
