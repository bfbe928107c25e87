"""The cost of the exchange between active replicas of the picker.

    python benchmarks/replicas.py [--rates 0,100,500,2000] [--seconds 4]

Two exchanges of this process over real connections on loopback: CPU of a replica by the rate of its
decisions (64 blocks each, 100 endpoints), of both directions, and bytes. Fixed seed. Prints a table
and writes benchmarks/results/replicas.json.
"""

import asyncio
import time
from random import Random
from typing import Any

import numpy as np
import uvloop
from measuring import Table, command_line, numbers, write_results

from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.discovery import PeerAddress
from picker.peers.exchange import ExchangeSettings, PeerExchange
from picker.peers.knowledge import Knowledge
from picker.peers.mesh import Mesh
from picker.peers.server import PeerServer, PoolReports, peer_port
from picker.plugins.producers.approx_prefix_cache_producer import (
    ApproxPrefixCacheParameters,
    ApproxPrefixCacheProducer,
)
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.types import Endpoint

SEED = 7
ENDPOINTS, BLOCKS = 100, 64
DECISION_RATES = (0, 100, 500, 2000)


class Deciding:
    """One replica that does nothing but report its decisions."""

    def __init__(self, number: int) -> None:
        self.rng = Random(SEED + number)
        self.inflight, datastore = InflightLoad(), Datastore()
        datastore.set_endpoints(
            [Endpoint(f"e{index}", f"10.0.0.{index}", 80) for index in range(ENDPOINTS)]
        )
        self.series = PickerMetrics().peers
        settings = ExchangeSettings("benchmark", SEED)
        knowledge = Knowledge(datastore, self.inflight)
        self.exchange = PeerExchange(settings, knowledge, time.monotonic(), time.time())
        self.producer = ApproxPrefixCacheProducer(
            "p", ApproxPrefixCacheParameters(), Services(NoHttp(), hash_seed=SEED)
        )
        self.exchange.use({"p": self.producer})
        self.server = PeerServer(
            {"pool": PoolReports(self.exchange, self.series, lambda: True)}, time.monotonic
        )
        self.mesh = Mesh(self.exchange, self.series, time.monotonic, None)

    async def decide(self, rate: float, seconds: float) -> None:
        """Send prompts somewhere; each is under way for a second."""
        loop = asyncio.get_running_loop()
        prompts = np.random.default_rng(SEED).integers(0, 2**63, (256, BLOCKS), np.uint64)
        began, count = loop.time(), 0
        while (now := loop.time()) - began < seconds:
            while rate and count < (now - began) * rate:
                count += 1
                key = f"default/e{self.rng.randrange(ENDPOINTS)}"
                self.exchange.outbox.placed("p", key, prompts[count % 256], 31250)
                self.inflight.acquire(key)
                loop.call_later(1.0, self.inflight.release, key)
            await asyncio.sleep(0.005)
        await asyncio.sleep(1.2)


async def spent_by(pair: list[Deciding], rate: float, seconds: float) -> float:
    """Cores that one of them takes, deciding included."""
    cpu = time.process_time()
    await asyncio.gather(*(one.decide(rate, seconds) for one in pair))
    return (time.process_time() - cpu) / (seconds + 1.2) / len(pair)


async def over_connections(rate: float, seconds: float) -> dict[str, Any]:
    """CPU of one of two replicas for both directions, at a rate of decisions of each."""
    pair = [Deciding(number) for number in range(2)]
    ports = [await one.server.start(peer_port("127.0.0.1", 0)) for one in pair]
    tasks = []
    for index, one in enumerate(pair):
        one.mesh.follow([PeerAddress(f"127.0.0.1:{ports[1 - index]}", "")])
        tasks += [asyncio.ensure_future(one.mesh.run()), asyncio.ensure_future(one.mesh.tick())]
    await asyncio.sleep(1.0)  # they meet
    spent = await spent_by(pair, rate, seconds)
    spent -= await spent_by([Deciding(9), Deciding(10)], rate, seconds)
    sent = sum(dict(one.series.bytes_total.numbers())[("sent",)] for one in pair) / len(pair)
    learned = min(one.exchange.learned.placements for one in pair)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for one in pair:
        await one.server.stop()
    return {
        "decisions_per_second": rate,
        "cores": round(spent, 4),
        "us_per_decision": round(1e6 * spent / rate, 1) if rate else None,
        "bytes_per_second": round(sent / seconds),
        "learned": learned,
    }


def main() -> None:
    """Measure each rate of decisions."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", type=numbers(int), default=DECISION_RATES)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each rate, twice")
    options = parser.parse_args()
    table = Table("decisions_per_second", "cores", "us_per_decision", "bytes_per_second")
    for rate in options.rates:
        table.add(**uvloop.run(over_connections(rate, options.seconds)))
    write_results(options, exchange=table.rows)


if __name__ == "__main__":
    main()
