"""Tiers below a worker's prefix cache, as the picker hears of them, and across a sudden death."""

from pathlib import Path
from struct import pack

import pytest

from picker.prefix.block_keys import BlockKeys
from picker.prefix.kv_event_codec import decode_events
from picker.prefix.precise_index import PreciseIndex
from tests.support.waiting import until
from tests.support.worker.made_up_disk import MadeUpDisk
from tests.support.worker.running_worker import Worker, running_worker
from tests.support.worker.tier_house import SIZE, House, prompt
from worker.engine.process.kv_events import EventEncoder

pytestmark = pytest.mark.full

MAKER = BlockKeys(SIZE)


def seen(index: PreciseIndex, tokens: list[int]) -> dict[str, int]:
    keys = MAKER.prompt("m", pack(f"<{len(tokens)}I", *tokens))
    match = index.match(keys, 0.0).get("w")
    return {} if match is None else dict(match.tiers)


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("as_int", [True, False])
def test_the_picker_knows_which_tier_has_a_block(form: str, as_int: bool) -> None:
    """After each request it scores what the worker then has: of each prompt the blocks up to the
    first that is nowhere, in every tier that has them.
    """
    house = House(num_slots=16, disk=MadeUpDisk())
    encoder = EventEncoder(SIZE, form, as_int)
    index = PreciseIndex(MAKER, {"gpu": 1.0, "cpu": 0.8, "storage": 0.5})
    tiers_seen: set[str] = set()
    for turn in range(3):
        for number in range(8):
            house.events = []
            house.ask(prompt(number), f"{turn}-{number}")
            events, skipped = decode_events(encoder.encode(house.events, 1.0))
            assert skipped == []
            for event in events:
                index.apply("w", "m", event)
            for other in range(8):
                expected = house.tiers_of(prompt(other))
                assert seen(index, prompt(other)[:-1]) == expected
                tiers_seen |= expected.keys()
    assert tiers_seen == {"gpu", "cpu", "storage"}
    assert index.dropped_blocks == 0
    index.check_integrity()


PATH = "/v1/completions"
TEXTS = [f"{n}: " + " ".join(f"{i} and {i + n}," for i in range(40)) for n in range(1, 9)]


async def said(worker: Worker, text: str) -> str:
    body = {"prompt": text, "max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    answer = await worker.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def counted(worker: Worker, name: str) -> float:
    page = (await worker.http.get("/metrics")).text
    (line,) = [line for line in page.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


@pytest.mark.soak
async def test_a_killed_worker_finds_its_disk(model_path: Path, tmp_path: Path) -> None:
    flags = ["--model", str(model_path), "--max-model-len", "1024"]
    flags += ["--num-gpu-blocks-override", "64", "--kv-offloading-size", "0.05"]
    flags += ["--kv-offloading-path", str(tmp_path)]
    async with running_worker(*flags) as worker:
        expected = [await said(worker, text) for text in TEXTS]
        assert await counted(worker, "vllm:prompt_tokens_cached_total") == 0
        assert [await said(worker, text) for text in TEXTS] == expected
        assert await counted(worker, "vllm:external_prefix_cache_hits_total") > 0
        assert await counted(worker, "pointsman:kv_disk_written_bytes_total") > 0
        worker.process.kill()
        await worker.exit_status()
    async with running_worker(*flags) as worker:
        await until(lambda: counted(worker, "pointsman:kv_disk_tier_blocks"))
        assert [await said(worker, text) for text in TEXTS] == expected
        assert await counted(worker, "pointsman:kv_disk_read_bytes_total") > 0
