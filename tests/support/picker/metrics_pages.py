"""Real HTTP servers that stand for endpoints: they serve metrics pages."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

VLLM, SGLANG = "vllm", "sglang"
START_SECONDS = 1_700_000_000
_NAMES = {
    VLLM: ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    SGLANG: ("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage"),
}
_GEOMETRY = {
    VLLM: 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1\n',
    SGLANG: 'sglang:cache_config_info{page_size="16",num_pages="4096"} 1\n',
}


def load_page(
    queue: float = 0, kv: float = 0.0, running: float = 0, engine: str = VLLM, labels: str = ""
) -> str:
    values = (queue, running, kv)
    return "".join(
        f"{name}{labels} {value}\n" for name, value in zip(_NAMES[engine], values, strict=True)
    )


def adapters_page(active: Iterable[str], waiting: Iterable[str] = (), most: int = 4) -> str:
    return (
        f'vllm:lora_requests_info{{max_lora="{most}",running_lora_adapters="{",".join(active)}",'
        f'waiting_lora_adapters="{",".join(waiting)}"}} {START_SECONDS}\n'
    )


def page(
    queue: float = 0,
    kv: float = 0.0,
    adapters: Iterable[str] = (),
    *,
    engine: str = VLLM,
    started: int = START_SECONDS,
    model: str = "my-model",
) -> str:
    lora = adapters_page(adapters) if engine == VLLM else ""
    start = f"process_start_time_seconds {started}\n"
    labels = f'{{model_name="{model}"}}'
    return load_page(queue, kv, engine=engine, labels=labels) + _GEOMETRY[engine] + lora + start


@dataclass
class Pod:
    """The page may change at any time; None is answered with status 500."""

    name: str
    address: str
    page: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    asked: int = 0
    rank: int | None = None

    @property
    def host_port(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    @property
    def entry(self) -> dict[str, Any]:
        labels = {"labels": dict(self.labels)} if self.labels else {}
        ranked = {} if self.rank is None else {"rank": self.rank}
        return {"name": self.name, "address": self.address, "port": self.port, **labels, **ranked}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                body = (self.page or "").encode()
                status = b"500 Broken" if self.page is None else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


_numbers = count(1)


@asynccontextmanager
async def serving(pod: Pod) -> AsyncIterator[Pod]:
    server = await asyncio.start_server(pod.answer, pod.address, pod.port)
    pod.port = server.sockets[0].getsockname()[1]
    try:
        yield pod
    finally:
        server.close()


def pods(*pages: str | None, labels: Iterable[Mapping[str, str]] = ()) -> list[Pod]:
    given = list(labels) or [{}] * len(pages)
    return [
        Pod(f"pod-{index}", f"127.0.{100 + next(_numbers) // 250}.{index + 1}", text, labels_)
        for index, (text, labels_) in enumerate(zip(pages, given, strict=True))
    ]
