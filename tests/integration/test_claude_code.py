"""Claude Code's requests, ten turns with tools, against a real worker process and its prefix cache.

The simulator says what the last message says, and its cache is the engine's.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet.running_fleet import talking_fleet
from tests.support.model.echo_model import TALK, write_echo_model
from tests.support.worker.claude_code import VERSIONS, Turn, talk
from tests.support.worker.sim_worker import SimWorker, sim_worker

MIN_CACHED = 0.95
REFUSAL = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
# Some templates take the system at the beginning alone.
TALK_OF_TWO = TALK.replace("{% for m in messages %}", "{% for m in messages %}" + REFUSAL)
FLAGS = ("--reasoning-parser", "qwen3")


@pytest.fixture(scope="module", params=[TALK, TALK_OF_TWO], ids=["turns", "folded"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimWorker]:
    flags = write_echo_model(tmp_path_factory.mktemp("echo"), request.param)
    with sim_worker(*flags, *FLAGS) as worker:
        yield worker


def assert_cached(turns: list[Turn]) -> None:
    shares = [turn.cached / turn.total for turn in turns[1:]]
    assert min(shares) > MIN_CACHED, shares


@pytest.mark.parametrize("version", VERSIONS)
def test_every_turn_finds_the_last_one_in_the_cache(worker: SimWorker, version: str) -> None:
    assert_cached(talk(worker.url, version))


@pytest.mark.envoy
@pytest.mark.full
async def test_the_same_through_a_fleet(tmp_path: Path) -> None:
    async with talking_fleet(tmp_path, *FLAGS) as fleet:
        for version in VERSIONS:
            assert_cached(await asyncio.to_thread(talk, fleet.url, version))
