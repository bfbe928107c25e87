"""The processes of `picker_ext_proc.py`: a pool, pickers, Envoys with them and without."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import cpu_seconds

from base.response_bodies import ResponseBodies
from fleet.envoy.binary import find_envoy
from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.probe import until
from fleet.envoy.settings import BootstrapConfig, PipeAddress, SocketAddress
from fleet.run.ports import free_ports

HOST = "127.0.0.1"
ANSWER = json.dumps({"model": "sim", "choices": [{"text": "word " * 60}], "usage": {}})
METRICS = "".join(
    f"# TYPE {name} {kind}\n{name}{labels} {value}\n"
    for name, kind, labels, value in (
        ("vllm:num_requests_waiting", "gauge", '{engine="0"}', 0),
        ("vllm:num_requests_running", "gauge", '{engine="0"}', 3),
        ("vllm:kv_cache_usage_perc", "gauge", '{engine="0"}', 0.25),
        ("vllm:cache_config_info", "gauge", '{block_size="16",num_gpu_blocks="8192"}', 1),
    )
)


@dataclass(slots=True)
class Site:
    """Everything that runs; pids by name."""

    folder: Path
    endpoints: list[int]
    pids: dict[str, int] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def cpu_seconds(self, name: str) -> float:
        """CPU time so far."""
        return cpu_seconds(self.pids[name])

    def switches(self, name: str) -> int:
        """The times so far that a thread has waited."""
        statuses = Path(f"/proc/{self.pids[name]}/task").glob("*/status")
        return sum(int(one.read_text().rpartition("\nvoluntary")[2].split()[1]) for one in statuses)


def answering_envoy(ports: Sequence[int], admin: int) -> dict[str, Any]:
    """A bootstrap with a listener for each port that answers everything itself."""

    def direct(path: str, text: str, kind: str) -> dict[str, Any]:
        match = {"prefix": path} if path == "/" else {"path": path}
        header = {"header": {"key": "content-type", "value": kind}}
        answer = {"status": 200, "body": {"inline_string": text}}
        return {"match": match, "direct_response": answer, "response_headers_to_add": [header]}

    routes = [
        direct("/metrics", METRICS, "text/plain"),
        direct("/health", "ok", "text/plain"),
        direct("/", ANSWER, "application/json"),
    ]
    name = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{name}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "endpoint",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{name}.http.router.v3.Router"},
            }
        ],
    }
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    listeners = [
        {
            "name": f"endpoint-{port}",
            "address": {"socket_address": {"address": HOST, "port_value": port}},
            "filter_chains": [chain],
        }
        for port in ports
    ]
    return {
        "admin": {"address": {"socket_address": {"address": HOST, "port_value": admin}}},
        "static_resources": {"listeners": listeners},
    }


def front_envoy(
    site: Site, options: argparse.Namespace, bodies: bool, port: int, picker: str = "picker"
) -> dict[str, Any]:
    """The bootstrap that `pointsman up` would use."""
    (admin,) = free_ports(HOST, 1, port + 1)
    config = BootstrapConfig(
        listen=SocketAddress(HOST, port),
        admin=SocketAddress(HOST, admin),
        picker=PipeAddress(str(site.folder / f"{picker}.sock"))
        if options.socket
        else SocketAddress(HOST, site.ports[picker]),
        picker_health=SocketAddress(HOST, site.ports[f"{picker} health"]),
        endpoints=tuple(SocketAddress(HOST, port) for port in site.endpoints),
        buffer_request_body=options.request_body == "buffered",
        response_bodies=ResponseBodies.ALL if bodies else ResponseBodies.OFF,
    )
    document: dict[str, Any] = json.loads(to_json(build(config)))
    return document


def without_picker(document: dict[str, Any]) -> dict[str, Any]:
    """The rival: the same Envoy, round robin."""
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    del chain["filters"][0]["typed_config"]["http_filters"][0]
    pool = document["static_resources"]["clusters"][0]
    del pool["load_balancing_policy"]
    pool["lb_policy"] = "ROUND_ROBIN"
    return document


@contextlib.asynccontextmanager
async def running(
    name: str, site: Site, *command: str, tree: Path | None = None
) -> AsyncIterator[None]:
    """A process around a block; its log is in the folder. Python imports from `tree`, if given."""
    path = {} if tree is None else {"PYTHONPATH": str(tree)}
    with (site.folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, cwd=tree, env={**os.environ, **path}
        )
    site.pids[name] = process.pid
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def envoy(name: str, site: Site, document: dict[str, Any], port: int) -> AsyncIterator[None]:
    """An Envoy with one thread, serving on `port`."""
    path = site.folder / f"{name}.json"
    path.write_text(json.dumps(document))
    flags = ("-c", str(path), "--disable-hot-restart", "--concurrency", "1", "--log-level", "off")
    async with running(name, site, str(find_envoy()), *flags):
        await until(SocketAddress(HOST, port), "/health")
        site.ports[name] = port
        yield


@contextlib.asynccontextmanager
async def picker(
    site: Site, options: argparse.Namespace, name: str = "picker", tree: Path | None = None
) -> AsyncIterator[None]:
    """The picker over the pool, of this checkout or of another one in `tree`."""
    endpoints = site.folder / "endpoints.yaml"
    endpoints.write_text(
        "endpoints:\n"
        + "".join(f'- {{name: w{p}, address: {HOST}, port: "{p}"}}\n' for p in site.endpoints)
    )
    grpc, health, metrics = free_ports(HOST, 3, max(*site.endpoints, *site.ports.values()) + 10)
    site.ports |= {name: grpc, f"{name} health": health}
    flags = ["--endpoints-file", str(endpoints), "--grpc-health-port", str(health)]
    if options.socket:
        flags += ["--bind-address", f"unix://{site.folder}/{name}.sock"]
    else:
        flags += ["--bind-address", HOST, "--grpc-port", str(grpc)]
    flags += ["--metrics-port", str(metrics), *options.picker_args.split()]
    async with running(name, site, sys.executable, "-m", "picker", *flags, tree=tree):
        await until(SocketAddress(HOST, metrics), "/readyz")
        yield


@contextlib.asynccontextmanager
async def sglang_router(site: Site) -> AsyncIterator[None]:
    """Another router before the same endpoints: sglang-router with its default policy."""
    port, metrics = free_ports(HOST, 2, max(site.ports.values()) + 10)
    urls = [f"http://{HOST}:{endpoint}" for endpoint in site.endpoints]
    flags = ["--policy", "cache_aware", "--host", HOST, "--port", str(port), "--log-level", "error"]
    flags += ["--prometheus-host", HOST, "--prometheus-port", str(metrics), "--worker-urls", *urls]
    command = (sys.executable, "-m", "sglang_router.launch_router", *flags)
    async with running("sglang-router", site, *command):
        await until(SocketAddress(HOST, port), "/health")
        site.ports["sglang-router"] = port
        yield
