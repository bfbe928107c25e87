"""KV that a process copies out of the device memory of another: the same answers, or computed.

The driver's part is played by memory of the host (`tests.support.worker.device_memory`).
"""

import ctypes
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.waiting import pass_time
from tests.support.worker.device_memory import build, cuda_pool, device_memory, load, pool_of
from tests.support.worker.kv_connectors import TOKEN_BYTES, ended, engine
from tests.support.worker.kv_engines import Engine, requests, tokens, until
from worker.config import KvTransferConfig
from worker.engine.messages import AddRequest
from worker.executor.kv_cache import KvPool, pool_bytes
from worker.types import KvSource, SamplingParams

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not sys.platform.startswith("linux"), reason="there is no cc"
)

# An engine that runs the prompts on its standard input, and prints where their KV is.
PREFILLER = """
import json, sys
import msgspec, torch
from functools import partial
from tests.support.worker.device_memory import cuda_pool, load, pool_of
from tests.support.worker.kv_engines import Engine
from worker.engine.messages import AddRequest
from worker.types import SamplingParams

how = json.loads(sys.argv[2])
how["dtype"] = getattr(torch, how["dtype"])
is_gpu = sys.argv[1] == "cuda"
first = Engine(make_pool=cuda_pool if is_gpu else partial(pool_of, load(sys.argv[1])), **how)
prompts = json.loads(sys.stdin.readline())
params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
asked = [AddRequest(f"r{n}", p, params, 0.0, keeps_kv=True) for n, p in enumerate(prompts)]
reported = first.run(*asked)
sources = [reported[r.request_id][-1].kv_offer.source for r in asked]
print(msgspec.json.encode(sources).decode(), flush=True)
for line in sys.stdin:
    print(first.connector.counts.num_bytes_sent, flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: Path) -> Any:
    return load(library)


@pytest.fixture
def no_bytes_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*what: object) -> Any:
        raise AssertionError("KV came through the host")

    monkeypatch.setattr("worker.kv.channel.Channel.receive_data", refuse)
    monkeypatch.setattr("worker.kv.fetching.map_shared", refuse)


@contextmanager
def prefiller(
    library: Path | str, asked: list[AddRequest], **how: Any
) -> Iterator[tuple[subprocess.Popen[str], list[AddRequest]]]:
    """Another process that has run the prompts, and the requests that take their KV."""
    fields = msgspec.json.encode({"dtype": "float32", **how}).decode()
    command = [sys.executable, "-c", PREFILLER, str(library), fields]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            prompts = [list(request.prompt_token_ids) for request in asked]
            process.stdin.write(msgspec.json.encode(prompts).decode() + "\n")
            process.stdin.flush()
            sources = msgspec.json.decode(process.stdout.readline(), type=list[KvSource])
            pairs = zip(asked, sources, strict=True)
            yield process, [msgspec.structs.replace(r, kv_source=s) for r, s in pairs]
        finally:
            process.kill()


@pytest.mark.usefixtures("no_bytes_on_the_host")
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"dtype": "float32"}, {}),
        ({"dtype": "bfloat16", "block_size": 8}, {"block_size": 4}),
        ({"dtype": "float8_e4m3fn", "block_size": 4}, {"block_size": 16, "overlap": True}),
    ],
)
def test_two_processes_answer_as_one_and_send_no_bytes(
    engines: Callable[..., Engine], library: Path, driver: Any, there: Any, here: Any
) -> None:
    asked, dtype = requests(12), getattr(torch, there["dtype"])
    expected = tokens(engines(dtype=dtype).run(*asked))
    second = engines(dtype=dtype, make_pool=partial(pool_of, driver), **here)
    with prefiller(library, asked, **there) as (process, decodes):
        assert tokens(second.run(*decodes)) == expected
        moved = second.stats.transfers
        process.stdin.write("\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) >= moved.bytes_received > 0
    assert moved.num_failed == 0
    assert second.num_computed <= len(asked) * here.get("block_size", 4)
    copies = [driver_count(driver, name) for name in ("opened", "closed", "copied")]
    assert copies[0] == copies[1] == copies[2] > 0


@pytest.mark.usefixtures("no_bytes_on_the_host")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_two_processes_answer_as_one_on_a_gpu(engines: Callable[..., Engine]) -> None:
    """The same with CUDA's driver."""
    asked = requests(12)
    expected = tokens(engines().run(*asked))
    second = engines(make_pool=cuda_pool)
    with prefiller("cuda", asked) as (_, decodes):
        assert tokens(second.run(*decodes)) == expected
    assert second.stats.transfers.num_failed == 0
    assert second.num_computed <= len(asked) * 4


def driver_count(driver: Any, name: str) -> int:
    return ctypes.c_int.in_dll(driver, name).value


class Interrupted(KvPool):
    """Something happens before bytes are copied."""

    happens: Callable[[], None]

    def fetch(self, handle: bytes, start: int, size: int) -> torch.Tensor:
        self.happens()
        return super().fetch(handle, start, size)


def prefill(request: AddRequest) -> AddRequest:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return msgspec.structs.replace(request, params=params, keeps_kv=True)


def long_requests() -> list[AddRequest]:
    return [r for r in requests(20) if len(r.prompt_token_ids) > 8][:2]


def interrupted(driver: Any, happens: Callable[[], None], **sizes: Any) -> Any:
    def make(runner: Any) -> KvPool:
        pool: Any = pool_of(driver, runner, made=Interrupted, **sizes)
        pool.happens = happens
        return pool

    return make


def test_memory_that_was_written_again_during_the_copy_is_not_used(
    engines: Callable[..., Engine], driver: Any
) -> None:
    """The exporter gives up, another export takes the room, and the copy has its bytes."""
    taken, other = long_requests()
    other = msgspec.structs.replace(other, prompt_token_ids=taken.prompt_token_ids[::-1])
    expected = tokens(engines().run(taken))
    token_bytes = engines().connector._state.token_bytes
    size = -(-len(taken.prompt_token_ids) // 4) * 4 * token_bytes
    first = engines(make_pool=partial(pool_of, driver, num_bytes=size), kv_buffer_size=size)
    source = first.run(prefill(taken))[taken.request_id][-1].kv_offer.source
    right = bytes(first.connector._exports._exports[source.transfer_id].data.host())
    copied: list[bytes] = []

    def happens() -> None:
        pass_time(first.connector._loop)
        until(lambda: source.transfer_id in first.connector._exports)
        offer = first.run(prefill(other))[other.request_id][-1].kv_offer
        assert first.connector._exports._exports[offer.source.transfer_id].data.start == 0

    class Seen(Interrupted):
        def fetch(self, *what: Any) -> torch.Tensor:
            data = super().fetch(*what)
            copied.append(data.numpy().tobytes())
            return data

    def make(runner: Any) -> KvPool:
        pool: Any = pool_of(driver, runner, made=Seen)
        pool.happens = happens
        return pool

    second = engines(make_pool=make)
    answer = second.run(msgspec.structs.replace(taken, kv_source=source))
    assert tokens(answer) == expected
    assert copied[0] != right[: len(copied[0])]
    assert second.stats.transfers.num_failed == 1
    assert second.num_computed == len(taken.prompt_token_ids)


def test_kv_of_a_process_that_is_killed_is_computed(
    engines: Callable[..., Engine], library: Path, driver: Any
) -> None:
    """SIGKILL comes when the handle has arrived and nothing is copied yet."""
    asked = long_requests()[:1]
    expected = tokens(engines().run(*asked))
    with prefiller(library, asked) as (process, decodes):

        def kill() -> None:
            process.kill()
            process.wait()

        second = engines(make_pool=interrupted(driver, kill))
        assert tokens(second.run(*decodes)) == expected
    assert second.stats.transfers.num_failed == 1
    assert second.stats.transfers.bytes_received == 0


def handed_over(first: Engine, second: Engine, asked: list[AddRequest]) -> Any:
    reported = first.run(*map(prefill, asked))
    sources = [reported[r.request_id][-1].kv_offer.source for r in asked]
    pairs = zip(asked, sources, strict=True)
    return second.run(*(msgspec.structs.replace(r, kv_source=s) for r, s in pairs))


def made_up_pool(driver: Any, num_blocks: int, made: type[KvPool] = KvPool) -> KvPool:
    """A pool for KV of one token a block, of which every byte is the block's number."""

    def read(blocks: Any, num_tokens: int, into: torch.Tensor) -> torch.Tensor:
        into.view(-1, TOKEN_BYTES)[:] = torch.tensor(list(blocks), dtype=torch.uint8)[:, None]
        return into[: num_tokens * TOKEN_BYTES]

    size = num_blocks * TOKEN_BYTES
    return made(driver._name, device_memory(driver, size), size, read, TOKEN_BYTES)


def bytes_of(blocks: Iterable[int]) -> bytes:
    return b"".join(bytes([block]) * TOKEN_BYTES for block in blocks)


GARBAGE = [
    (lambda handle: handle[:16] + b"x" * 64, "cuIpcOpenMemHandle_v2 .* error 1"),
    (lambda handle: handle[:-1], "no memory"),
    (lambda handle: handle[:8] + bytes(8) + handle[16:], "no memory"),
    (lambda handle: b"", "no memory"),
]


@pytest.mark.parametrize(("spoil", "said"), GARBAGE)
def test_a_wrong_handle_is_reported_and_the_bytes_come_another_way(
    engines: Callable[..., Engine],
    driver: Any,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[bytes], bytes],
    said: str,
) -> None:
    asked = long_requests()
    expected = tokens(engines().run(*asked))
    first, second = (engines(make_pool=partial(pool_of, driver)) for _ in range(2))
    first.pool._handle = spoil(first.pool._handle)
    assert tokens(handed_over(first, second, asked)) == expected
    assert second.stats.transfers.num_failed == 0
    assert second.num_computed <= 4 * len(asked)
    (record, *_) = [r for r in caplog.records if "host's memory" in r.message]
    assert re.search(said, record.message)


@pytest.mark.parametrize("lacks", ["the taker has no GPU", "the pool is full", "all is taken"])
def test_kv_comes_through_the_host_where_no_device_takes_it(
    engines: Callable[..., Engine], driver: Any, lacks: str
) -> None:
    asked = long_requests()
    expected = tokens(engines().run(*asked))
    none = {"num_bytes": 4} if lacks == "the pool is full" else {}
    first = engines(make_pool=partial(pool_of, driver, **none))
    second = engines(make_pool=None if "GPU" in lacks else partial(pool_of, driver))
    if lacks == "all is taken":
        second.pool.limit_bytes = 1
    before = driver_count(driver, "opened")
    assert tokens(handed_over(first, second, asked)) == expected
    assert driver_count(driver, "opened") == before
    assert second.stats.transfers.num_failed == 0
    assert second.stats.transfers.bytes_received > 0
    assert second.num_computed <= 4 * len(asked)


def test_an_export_whose_copy_failed_can_be_fetched_again(driver: Any) -> None:
    """Its memory stays its own until then, and is given back afterwards."""
    pool, ill = made_up_pool(driver, 4), made_up_pool(driver, 1, Interrupted)
    begun = threading.Event()

    def leave() -> None:
        begun.set()
        raise OSError("the taker has ended")

    ill.happens = leave  # type: ignore[attr-defined]
    ill.limit_bytes = 1 << 20
    with engine(pool=pool) as keeper, engine(pool=pool) as taker, engine(pool=ill) as other:
        source = keeper.keep("r", b"d", pool.keep((1, 2, 3), 3), ()).source
        assert ended(other.pull(source, b"d", 0)) is None
        assert begun.is_set()
        until(lambda: source.transfer_id in keeper._exports)
        assert pool.keep((4, 5), 2) is None
        assert ended(taker.pull(source, b"d", 1)).data.numpy().tobytes() == bytes_of((2, 3))
        until(lambda: pool.keep((4, 5), 2) is not None)


def test_regions_of_a_pool_never_overlap(driver: Any) -> None:
    """The bytes of each export stay as they were while others come and go."""
    rng, held = random.Random(5), []
    pool = made_up_pool(driver, 20)
    refused = 0
    for step in range(400):
        if held and rng.random() < 0.45:
            held.pop(rng.randrange(len(held)))
        blocks = [step % 251] * rng.randrange(1, 6)
        made = pool.keep(blocks, len(blocks))
        if made is None:
            refused += 1
        else:
            held.append((made, blocks))
        for export, is_of in held:
            assert bytes(export.host()) == bytes_of(is_of)
    assert 20 < refused < 380
    del made, export
    held.clear()
    assert pool.keep(range(20), 20) is not None


@pytest.mark.parametrize("lacks", ["the library", "such memory"])
def test_a_driver_that_shares_no_memory_leaves_the_host(
    driver: Any, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    memory = torch.zeros(TOKEN_BYTES, dtype=torch.uint8)
    name = "libmissing.so" if lacks == "the library" else driver._name
    pool = KvPool(name, memory, TOKEN_BYTES, lambda *_: memory, TOKEN_BYTES)
    assert pool.keep((0,), 1) is None
    assert pool.limit_bytes == 0
    said = "libmissing" if lacks == "the library" else "cuMemGetAddressRange_v2 of the CUDA driver"
    assert said in caplog.text


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 1_000_000_000),
        ({"kv_buffer_size": 8e9}, 1_600_000_000),
        ({"kv_buffer_size": 8e9, "kv_ip": "::1"}, 1_600_000_000),
        ({"kv_ip": "10.0.0.1"}, 0),
    ],
)
def test_a_pool_is_a_small_part_of_the_gpu(fields: dict[str, Any], size: int) -> None:
    """There is none where no process of the same machine connects."""
    assert pool_bytes(KvTransferConfig(**fields), 80_000_000_000) == size
