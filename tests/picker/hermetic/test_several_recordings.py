"""A picker of several pools records each of them by itself, and each can be decided again."""

import asyncio
from pathlib import Path

import pytest

from fleet.commands.cli import main
from picker.cli.options import RecordFlags
from picker.recording.lines import Header, read_recording
from picker.recording.replay import Replay
from tests.support.picker.ext_proc_stream import completion
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.pools_scene import several_pools
from tests.support.waiting import until

REQUESTS = {"llama": 40, "x/qwen": 25, "y/qwen": 15}


async def test_each_pool_is_decided_again_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = pods(page(), page(queue=2), page(queue=1))
    pools = {"llama": some, "x/qwen": some, "y/qwen": pods(page())}
    record = RecordFlags(tmp_path / "decisions-{pool}.jsonl")
    async with several_pools(tmp_path, pools, record=record) as scene:

        async def ask(key: str, number: int) -> None:
            async with scene[key].stream() as stream:
                await stream.ask(completion(prompt=f"about {key} {number % 5} " * 40))
                await stream.respond([b"{}"])

        numbered = [(key, number) for key, most in REQUESTS.items() for number in range(most)]
        await asyncio.gather(*(ask(*one) for one in numbered))
        for key in REQUESTS:
            await until(scene[key].is_idle)
    for key, number in REQUESTS.items():
        path = tmp_path / f"decisions-{key.replace('/', '_')}.jsonl"
        found = list(Replay(str(path)).decisions(read_recording(path)))
        assert len(found) == number
        assert all(one.is_identical for one in found)
        assert header_of(path) == key.rpartition("/")[2]
        assert main(["replay", str(path)]) == 0
        summary = capsys.readouterr().out.splitlines()[0]
        assert summary == f"{number} decisions, {number} identical"


def header_of(path: Path) -> str:
    header = next(read_recording(path)).line
    assert isinstance(header, Header)
    return header.pool_name
