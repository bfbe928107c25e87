"""Workers whose model is spread over two processes, on a CPU: what comes of the end of either."""

import asyncio
import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.model.echo_model import write_echo_model
from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.waiting import until
from tests.support.worker.running_worker import (
    PATIENCE_SECONDS,
    assert_each_reports_its_end,
    running_worker,
    under_load,
)
from worker.config import EngineConfig, SchedulerConfig
from worker.engine.messages import AddRequest
from worker.engine.process.client import EngineClient
from worker.errors import EngineDeadError
from worker.types import SamplingParams

pytestmark = pytest.mark.full

STREAMS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    write_echo_model(path)
    config = json.loads((path / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config |= {**sizes, "num_key_value_heads": 2, "tie_word_embeddings": True}
    save_checkpoint(path, {**config, "rms_norm_eps": 1e-5, "rope_theta": 10000.0})
    return path


def rank_of(engine: int | None) -> int:
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    assert len(children) == 1, "one other rank"
    return int(children[0])


class Watched:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._fd, self._end)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._ended.wait()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ended.set()


async def test_a_rank_that_dies_ends_every_stream_and_the_worker_serves_again(
    checkpoint: Path,
) -> None:
    """An error event each, a new engine with a new rank and the same answers; and at the regular
    end of the worker no rank is left.
    """
    flags = ("--model", str(checkpoint), "--tensor-parallel-size", "2", "--device", "cpu")
    async with running_worker(*flags, "--max-num-seqs", str(STREAMS)) as worker:
        fields = {"temperature": 0, "max_tokens": 16}
        before = (await worker.ask(**fields)).json()["choices"]
        engine = worker.engine_pid()
        lost = Watched(rank_of(engine))
        streams, harmed = await under_load(worker, lost.kill, STREAMS, max_tokens=3500)
        assert_each_reports_its_end(streams)
        last_error = max(stream.seconds for stream in streams) - harmed
        print(f"\nlast error event {last_error:.2f} s after the rank's end")  # noqa: T201
        await lost.end()
        await worker.until("/health", 200)
        assert (await worker.ask(**fields)).json()["choices"] == before
        assert worker.engine_pid() not in (None, engine)
        last = Watched(rank_of(worker.engine_pid()))
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_status() == 0
        await last.end()


async def test_no_rank_outlives_an_engine_and_no_engine_an_idle_rank(checkpoint: Path) -> None:
    """A rank that is killed while nothing runs ends the engine; a killed engine ends its rank, even
    a stopped one; each time another engine serves.
    """
    limits = SchedulerConfig(max_model_len=256)
    config = EngineConfig(
        "torch", str(checkpoint), device="cpu", tensor_parallel_size=2, scheduler=limits
    )
    client = EngineClient(config)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.start()
        try:
            engines = [client.pid]
            Watched(rank_of(client.pid)).kill()
            await until(lambda: not client.is_alive)
            with pytest.raises(EngineDeadError, match="exit code 1"):
                client.open(AddRequest("a", [1], SamplingParams(2), 0.0))
            await until(lambda: client.is_alive)
            engines.append(client.pid)
            rank, engine = Watched(rank_of(client.pid)), Watched(client.pid or 0)
            os.kill(rank.pid, signal.SIGSTOP)
            engine.kill()
            await rank.end()
            await until(lambda: not client.is_alive)
            await until(lambda: client.is_alive)
            assert client.pid not in engines
            (stream,) = client.open(AddRequest("b", [1], SamplingParams(2), 0.0))
            with closing(stream):
                assert (await stream.next()).error is None
            rank = Watched(rank_of(client.pid))
        finally:
            await client.shutdown()
        await rank.end()
