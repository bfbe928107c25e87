"""The cost of showing responses to the picker, and the truth of what it then knows.

    python benchmarks/response_bodies.py                       # about five minutes
    python benchmarks/response_bodies.py --quick               # does it work?

A real Envoy and a real picker for each mode of `--response-bodies`, all in front of the same
server, which answers like vLLM: the headers at once, then one event for each token, a usage and
`[DONE]`. One client sends one request after another, to each mode in turns, so that whatever else
the machine does meets all modes alike. CPU is the time on a core (schedstat) of Envoy and of the
picker, per request; a row is the median of its rounds, and `ratio` the median of the rounds' own
ratios to `off`. `first_ms` and `end_ms` are what the client waits for the first event and the end,
`off_by_ms` is the difference between the client's time of the first event and that in the picker's
metrics. Fixed seed. Writes benchmarks/results/response_bodies.json.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from ext_proc_site import HOST, Site, envoy, running
from measuring import Table, child, command_line, cpu_seconds, write_results

from base.response_bodies import ResponseBodies
from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.probe import until
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from fleet.run.ports import free_ports

SEED = 20261129
MODES = tuple(mode.value for mode in ResponseBodies)
PREFILL_SECONDS = 0.02
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
COLUMNS = (
    *("mode <6", "envoy_ms .3f", "picker_ms .3f", "both_ms .3f", "ratio .3f"),
    *("first_ms .2f", "end_ms .2f", "off_by_ms .2f", "usages", "firsts"),
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int, **more: object) -> bytes:
    delta = {"index": 0, "delta": {"content": f" w{number}"}, "finish_reason": None}
    said = {"id": f"chatcmpl-{SEED}", "object": "chat.completion.chunk", "created": 1764400000}
    document = {**said, "model": "sim", "choices": [delta], **more}
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gap: float) -> None:
    """Answer the requests of one connection, one after another."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET"):
                writer.write(PLAIN)
                continue
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            writer.write(HEAD)
            await asyncio.sleep(PREFILL_SECONDS)
            for number in range(asked["max_tokens"]):
                writer.write(event(number))
                await asyncio.sleep(gap)
            counts = {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}
            writer.write(event(0, choices=[], usage={**counts, "total_tokens": 71}))
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(pipe: Any, port: int, gap: float) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: answer(r, w, gap), HOST, port)
        pipe.send("ready")
        await server.serve_forever()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def fleet(site: Site, mode: str, options: argparse.Namespace) -> AsyncIterator[None]:
    """A picker and an Envoy; both are named in `site` by the mode."""
    folder = site.folder / mode
    folder.mkdir()
    endpoints = folder / "endpoints.yaml"
    port = site.endpoints[0]
    endpoints.write_text(f'endpoints:\n- {{name: w, address: {HOST}, port: "{port}"}}\n')
    grpc, health, http, admin, front = free_ports(HOST, 5, max(site.ports.values()) + 1)
    flags = ["--endpoints-file", str(endpoints), "--bind-address", HOST]
    flags += ["--grpc-port", str(grpc), "--grpc-health-port", str(health)]
    flags += ["--metrics-port", str(http), "--response-bodies", mode, *options.picker_args.split()]
    # Scrapes would weigh more than the requests of a single client.
    flags += ["--refresh-metrics-interval", "10s"]
    config = BootstrapConfig(
        listen=SocketAddress(HOST, front),
        admin=SocketAddress(HOST, admin),
        picker=SocketAddress(HOST, grpc),
        picker_health=SocketAddress(HOST, health),
        endpoints=(SocketAddress(HOST, port),),
        buffer_request_body=True,
        response_bodies=ResponseBodies(mode),
    )
    own = Site(folder, site.endpoints)
    async with running("picker", own, sys.executable, "-m", "picker", *flags):
        await until(SocketAddress(HOST, http), "/readyz")
        async with envoy("envoy", own, json.loads(to_json(build(config))), front):
            site.ports |= {mode: front, f"{mode}-metrics": http, f"{mode}-admin": admin}
            site.pids |= {f"{mode}-picker": own.pids["picker"], f"{mode}-envoy": own.pids["envoy"]}
            yield


async def ask(client: aiohttp.ClientSession, port: int, tokens: int, rng: random.Random) -> Any:
    """Send one request; return the seconds to the first piece and to the end."""
    prompt = "".join(rng.choices("abcdefgh ", k=400))
    body = {"model": "sim", "messages": [{"role": "user", "content": prompt}], "stream": True}
    began, first = time.perf_counter(), None
    url = f"http://{HOST}:{port}/v1/chat/completions"
    async with client.post(url, json={**body, "max_tokens": tokens}) as response:
        async for _ in response.content.iter_any():
            first = first or time.perf_counter() - began
    if response.status != 200 or first is None:
        raise RuntimeError(f"{port} answered {response.status}")
    return first, time.perf_counter() - began


async def series(client: aiohttp.ClientSession, port: int, name: str) -> float:
    async with client.get(f"http://{HOST}:{port}/metrics") as response:
        page = await response.text()
    lines = [line for line in page.splitlines() if line.startswith(f"llm_d_epp_{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def turn(
    client: aiohttp.ClientSession, site: Site, mode: str, options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Send the requests of one turn; return CPU per request and times in milliseconds."""
    rng, name = random.Random(seed), "request_ttft_seconds"
    metrics, pids = site.ports[f"{mode}-metrics"], site.pids
    counted = [await series(client, metrics, f"{name}_{part}") for part in ("sum", "count")]
    used = await series(client, metrics, "request_output_tokens_sum")
    before = {part: cpu_seconds(pids[f"{mode}-{part}"]) for part in ("envoy", "picker")}
    times = [
        await ask(client, site.ports[mode], options.tokens, rng) for _ in range(options.requests)
    ]
    await asyncio.sleep(0.05)  # for the end of the last stream
    after = {part: cpu_seconds(pids[f"{mode}-{part}"]) for part in before}
    spent = {f"{p}_ms": 1e3 * (after[p] - before[p]) / options.requests for p in before}
    known = [await series(client, metrics, f"{name}_{part}") for part in ("sum", "count")]
    firsts, off_by = known[1] - counted[1], None
    if firsts == options.requests:
        client_sum = sum(first for first, _ in times)
        off_by = 1e3 * (client_sum - (known[0] - counted[0])) / options.requests
    used = await series(client, metrics, "request_output_tokens_sum") - used
    return {
        **spent,
        "both_ms": sum(spent.values()),
        "first_ms": 1e3 * median(first for first, _ in times),
        "end_ms": 1e3 * median(end for _, end in times),
        "off_by_ms": off_by,
        "firsts": int(firsts),
        "usages": int(used / options.tokens),
    }


def combined(rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("envoy_ms", "picker_ms", "both_ms", "first_ms", "end_ms")
    row = {key: median(one[key] for one in rounds) for key in keys}
    pairs = zip(rounds, base, strict=True)
    row["ratio"] = median(one["both_ms"] / off["both_ms"] for one, off in pairs)
    known = [one["off_by_ms"] for one in rounds if one["off_by_ms"] is not None]
    row["off_by_ms"] = median(known) if known else None
    return row | {key: sum(one[key] for one in rounds) for key in ("usages", "firsts")}


async def measure(options: argparse.Namespace, site: Site) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        for mode in options.modes:
            await stack.enter_async_context(fleet(site, mode, options))
            await turn(client, site, mode, options, 0)  # warm
        for number in range(options.rounds):
            order = list(options.modes)
            random.Random(SEED + number).shuffle(order)
            for mode in order:
                found[mode].append(await turn(client, site, mode, options, SEED + number))
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=20, help="of a turn")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap", type=float, default=0.003, help="seconds between tokens")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--picker-args", default="", help="more flags for the picker")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 2, 3
    with tempfile.TemporaryDirectory() as folder:
        (port,) = free_ports(HOST, 1, 21_000)
        with child(serve, port, options.gap):
            site = Site(Path(folder), [port], ports={"": port})
            found = asyncio.run(measure(options, site))
    table = Table(*COLUMNS)
    for mode, rounds in found.items():
        table.add(mode=mode, **combined(rounds, found[options.modes[0]]))
    write_results(options, rows=table.rows, rounds=found)


if __name__ == "__main__":
    main()
