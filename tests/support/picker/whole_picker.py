"""The whole picker in this process, pods that are real HTTP servers, and views of its state."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from picker.app.picker import Picker, compose
from picker.app.served_pool import ServedPool
from picker.cli.options import Options, Ports
from tests.support.picker.ext_proc_stream import (
    PATIENCE_SECONDS,
    GatewayStream,
    Message,
    destination_of,
)
from tests.support.picker.metrics_pages import Pod, serving
from tests.support.waiting import until

PolicyObject = dict[str, Any]
LOOPBACK = {"bind_address": "127.0.0.1", "grpc_port": 0, "grpc_health_port": 0, "metrics_port": 0}
MAX_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
# What the reference's hermetic tests run with.
FOUR_SCORERS = (
    HEAD
    + """
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: lora-affinity-scorer}
- {type: openai-parser}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer}
  - {pluginRef: kv-cache-utilization-scorer}
  - {pluginRef: prefix-cache-scorer}
  - {pluginRef: lora-affinity-scorer}
requestHandler: {parsers: [{pluginRef: openai-parser}]}
"""
)


@dataclass
class WholePicker:
    picker: Picker
    ports: Ports
    pods: Sequence[Pod]
    endpoints_file: Path
    channel: grpc.aio.Channel
    http: aiohttp.ClientSession
    policies: Sequence[PolicyObject] = field(default=(), kw_only=True)
    key: str = field(default="", kw_only=True)

    @property
    def pool(self) -> ServedPool:
        return self.picker.pools[self.key]

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[GatewayStream]:
        """Yield a stream that must end in order, with nothing left unread."""
        stream = GatewayStream(self.channel)
        try:
            yield stream
            assert await stream.rest() == []
            assert await stream.call.code() is grpc.StatusCode.OK
        finally:
            stream.call.cancel()

    async def ask(self, body: bytes, *args: Any, **kwargs: Any) -> list[Message]:
        async with self.stream() as stream:
            return await stream.ask(body, *args, **kwargs)

    async def destination(self, body: bytes, *args: Any, **kwargs: Any) -> str:
        return destination_of(await self.ask(body, *args, **kwargs))

    async def get(self, path: str) -> tuple[int, str]:
        below = f"/pools/{self.key}" if self.key else ""
        url = f"http://127.0.0.1:{self.ports.metrics}{below}{path}"
        async with self.http.get(url) as response:
            return response.status, await response.text()

    async def endpoints(self) -> dict[str, dict[str, Any]]:
        rows = json.loads((await self.get("/endpoints"))[1])["endpoints"]
        return {row["name"]: row for row in rows}

    async def series(self, name: str, /, **labels: str) -> float | None:
        samples = await self._samples(name)
        found = [one.value for one in samples if labels.items() <= one.labels.items()]
        return sum(found) if found else None

    async def _samples(self, name: str) -> list[Sample]:
        families = text_string_to_metric_families((await self.get("/metrics"))[1])
        return [one for family in families for one in family.samples if one.name == name]

    async def requests(self, **labels: str) -> float | None:
        return await self.series("llm_d_epp_request_total", **labels)

    async def has_read_pages(self) -> bool:
        rows = await self.endpoints()
        known = [pod for pod in self.pods if pod.page is not None]
        return all(pod.name in rows and rows[pod.name]["metrics"] for pod in known)

    async def is_idle(self) -> bool:
        running = await self.series("llm_d_epp_request_running")
        rows = await self.endpoints()
        return not running and not any(row["inflight_requests"] for row in rows.values())

    async def knows(self, name: str, **metrics: Any) -> None:
        """Wait until the load of an endpoint has these numbers; without any, it is unknown."""

        async def is_so() -> bool:
            known = (await self.endpoints()).get(name, {}).get("metrics")
            if known is None or not metrics:
                return known is None and not metrics
            return bool(metrics.items() <= known.items())

        await until(is_so)

    async def outcomes(self) -> dict[str, float]:
        samples = await self._samples("pointsman_request_outcomes_total")
        return {one.labels["cause"]: one.value for one in samples}

    def list_endpoints(self, pods: Sequence[Pod]) -> None:
        self.pods = pods
        write_endpoints(self.endpoints_file, pods, self.policies)

    def list_policies(self, policies: Sequence[PolicyObject]) -> None:
        self.policies = policies
        write_endpoints(self.endpoints_file, self.pods, policies)


def write_endpoints(path: Path, pods: Sequence[Pod], policies: Sequence[PolicyObject] = ()) -> None:
    fresh = path.with_suffix(".new")
    documents: list[Any] = [{"endpoints": [pod.entry for pod in pods]}, *policies]
    fresh.write_text("\n---\n".join(map(json.dumps, documents)))
    fresh.rename(path)


def objective(name: str, priority: int | None, **spec: Any) -> PolicyObject:
    given = {} if priority is None else {"priority": priority}
    return _policy("InferenceObjective", name, given | spec)


def rewrite(name: str, *rules: Mapping[str, Any], **metadata: Any) -> PolicyObject:
    made = _policy("InferenceModelRewrite", name, {"rules": list(rules)})
    made["metadata"] |= metadata
    return made


def rule(models: str = "", /, **targets: int | None) -> dict[str, Any]:
    weights = {
        name: {} if weight is None else {"weight": weight} for name, weight in targets.items()
    }
    made: dict[str, Any] = {
        "targets": [{"modelRewrite": name} | weight for name, weight in weights.items()]
    }
    if models:
        made["matches"] = [{"model": {"value": name}} for name in models.split()]
    return made


def _policy(kind: str, name: str, spec: Mapping[str, Any]) -> PolicyObject:
    return {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"poolRef": {"name": "default"}, **spec},
    }


@asynccontextmanager
async def whole_picker(
    folder: Path,
    pods: Sequence[Pod] = (),
    config: str | None = FOUR_SCORERS,
    *,
    objectives: Mapping[str, int] | None = None,
    rewrites: Sequence[PolicyObject] = (),
    **changes: Any,
) -> AsyncIterator[WholePicker]:
    async with AsyncExitStack() as stack:
        for pod in pods:
            await stack.enter_async_context(serving(pod))
        path = folder / "endpoints.yaml"
        policies = [objective(*one) for one in (objectives or {}).items()] + [*rewrites]
        write_endpoints(path, pods, policies)
        options = {
            "config_text": config,
            "endpoints_file": path,
            "allow_experimental_plugins": True,
        }
        async with started_picker(Options(**LOOPBACK | options | changes)) as (picker, ports):
            address = f"127.0.0.1:{ports.grpc}"
            async with (
                grpc.aio.insecure_channel(address, options=MAX_MESSAGE) as channel,
                aiohttp.ClientSession() as http,
            ):
                running = WholePicker(picker, ports, pods, path, channel, http, policies=policies)
                await until(running.has_read_pages)
                yield running


@asynccontextmanager
async def started_picker(options: Options) -> AsyncIterator[tuple[Picker, Ports]]:
    picker = compose(options)
    started: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(picker.run(started.set_result))
    awaited: list[asyncio.Future[Any]] = [started, task]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield picker, started.result()
    finally:
        picker.stop()
        picker.stop()
        await asyncio.wait_for(task, PATIENCE_SECONDS)
