"""A picker of several pools: each of them is checked like a picker of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from fleet.doctor.command import diagnose
from fleet.doctor.diagnosis import Facts
from fleet.doctor.picker_look import ask_picker
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.pools_scene import SeveralPools, several_pools


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[SeveralPools]:
    known = pods(page(), page())
    pools = {"llama": known, "a/qwen": known[:1], "b/qwen": ()}
    async with several_pools(tmp_path, pools) as made:
        yield made


async def test_each_pool_has_findings_of_its_own(scene: SeveralPools) -> None:
    root = f"http://127.0.0.1:{scene.ports.metrics}"
    for key, endpoints, checks in (
        ("llama", 2, set()),
        ("a/qwen", 1, set()),
        ("b/qwen", 0, {"picker-endpoints"}),
    ):
        facts = await ask_picker(f"{root}/pools/{key}/")
        assert facts.problem is None
        assert len(facts.endpoints) == endpoints
        assert facts.config is not None
        assert facts.metrics["llm_d_epp_ready_endpoints"] == endpoints
        assert facts.files is not None
        found = {one.check for one in diagnose(Facts(picker=facts))}
        assert found == checks


async def test_the_address_of_all_and_of_none(scene: SeveralPools) -> None:
    root = f"http://127.0.0.1:{scene.ports.metrics}"
    for url in (root, f"{root}/pools", f"{root}/pools/other"):
        (found,) = diagnose(Facts(picker=await ask_picker(url)))
        assert found.check == "picker-reachable"
        assert url in found.seen
