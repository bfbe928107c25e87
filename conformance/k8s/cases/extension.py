"""One picker for several InferencePools: no protocol asks for it, so pickers that cannot are not
asked. Those that can keep the pools apart.
"""

import asyncio
from collections.abc import Mapping

from conformance.case import Case, Provision, case, expect
from conformance.epp.scene import said
from conformance.k8s.cases.sources import EXTENSION
from conformance.k8s.scene import ClusterScene, Side, of_several
from conformance.waiting import until
from conformance.wire.messages import SELECTION, Request

_SELECTION, _SEVERAL = Provision.SELECTION, Provision.SEVERAL_POOLS
_REQUESTS, _AT_ONCE = 40, 10  # for each pool
_A_WHILE = 40


def _all_addresses(sides: Mapping[str, Side]) -> list[str]:
    return [address for side in sides.values() for address in side.plan.addresses]


@case("several-pools-kept-apart", EXTENSION, _SELECTION, _SEVERAL)
async def separate_pools(scene: ClusterScene) -> None:
    """A picker of several InferencePools, each at its own port, MUST pick only from the pool of the
    called port, even while all are called at once and the Pods of all are selected.
    """
    async with scene.several_pools() as sides:
        everywhere = _all_addresses(sides)
        for name, side in sides.items():
            strangers = [one for one in everywhere if one not in side.plan.addresses]
            answer = await side.scene.ask(Request({SELECTION: ",".join(strangers)}))
            expect(not answer.endpoints, f"{name}, for Pods of other pools: {said(answer)}")
        room = asyncio.Semaphore(_AT_ONCE * len(sides))

        async def one(name: str, at: int) -> None:
            chosen = everywhere if at % 2 else ()
            async with room:
                method = "POST" if at % 4 < 2 else "GET"
                reply = await scene.post(f"/{of_several(name)}", chosen, method=method)
            expect(reply.status == 200, f"{name}: status {reply.status}: {reply.body[:200]!r}")
            own = sides[name].plan.endpoints
            expect(reply.endpoint in own, f"{name}: served by {reply.endpoint}")

        await asyncio.gather(*(one(name, at) for at in range(_REQUESTS) for name in sides))


@case("several-pools-one-deleted", EXTENSION, _SELECTION, _SEVERAL)
async def one_deleted(scene: ClusterScene) -> None:
    """When one InferencePool of several is deleted requests at its port MUST be rejected (503) and
    no request of the others fail; with the pool back the picker MUST pick for it again.
    """
    async with scene.several_pools() as sides:
        gone, *others = sides
        side, other = sides[gone], of_several(others[0])

        async def refuses() -> bool:
            answer = await side.scene.ask(Request())
            expect(answer.status in (None, 503), f"the answer is {said(answer)}")
            return answer.status == 503

        async with scene.traffic(f"/{other}") as traffic:
            await scene.delete_pool(gone)
            await until(refuses, "requests of the deleted pool are refused", scene.follow_seconds)
            for name in others:
                why = "the other pools have their endpoints"
                await sides[name].until_endpoints(sides[name].plan.endpoints, why)
            await traffic.goes_on(_A_WHILE, scene.follow_seconds)
            strangers = traffic.served_by() - set(sides[others[0]].plan.endpoints)
            expect(not strangers, f"{others[0]}: served by {sorted(strangers)}")
            await scene.put_pool(gone)
            await side.until_endpoints(side.plan.endpoints, "the pool's Pods are endpoints again")


CASES: tuple[Case[ClusterScene], ...] = (separate_pools, one_deleted)
