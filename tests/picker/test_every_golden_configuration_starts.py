"""Every golden configuration starts a whole picker that routes, or is refused with its reasons."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from picker.app.picker import compose
from picker.cli.options import Options, Ports
from picker.errors import ConfigError
from tests.support.picker.configured_requests import GOLDEN, golden, golden_output
from tests.support.picker.ext_proc_stream import GatewayStream, completion, destination_of
from tests.support.picker.whole_picker import LOOPBACK

CASES = {case: yaml.safe_load(golden_output(case).read_text()) for case in GOLDEN}
PUBLISHED = [name for name in CASES if name.startswith("published_")]
GOOD = {name: meaning for name, meaning in CASES.items() if "errors" not in meaning}
REFUSED = {name: meaning for name, meaning in CASES.items() if "errors" in meaning}
ENDPOINTS = {
    "endpoints": [
        {"name": role, "address": "127.0.0.1", "port": port, "labels": {"llm-d.ai/role": role}}
        for port, role in ((9, "prefill"), (11, "decode"), (13, "encode-prefill-decode"))
    ]  # no server answers there
}
# A prompt, as the parsers of the two protocols expect it: a path and a body.
OVER_HTTP = ("/v1/completions", completion())
OVER_GRPC = ("/vllm.grpc.engine.VllmEngine/Generate", b"\0\0\0\0\x05\x1a\x03abc")
PATIENCE_SECONDS = 120.0


def options(folder: Path, case: str, meaning: Mapping[str, Any]) -> Options:
    endpoints = folder / "endpoints.yaml"
    endpoints.write_text(json.dumps(ENDPOINTS))
    text = golden(case)
    discovers = meaning.get("discovery") is not None
    if discovers:
        text = placed(text, str(endpoints))
    return Options(
        config_text=text,
        endpoints_file=None if discovers else endpoints,
        allow_experimental_plugins="experimental_refused" not in case,
        drain_timeout_seconds=0.0,
        **LOOPBACK,
    )


def placed(text: str, path: str) -> str:
    config = yaml.safe_load(text)
    for plugin in config["plugins"]:
        if plugin["type"].endswith("file-discovery"):
            plugin["parameters"]["path"] = path
    return json.dumps(config)


async def routed(port: int, path: str, body: bytes) -> str:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return destination_of(await GatewayStream(channel).ask(body, path=path))


@pytest.mark.parametrize("case", GOOD)
async def test_a_good_configuration_starts_and_ends_in_order(tmp_path: Path, case: str) -> None:
    meaning = GOOD[case]
    picker = compose(options(tmp_path, case, meaning))
    listed = {meaning["handler"], *meaning["producers"], *meaning["hooks"], *meaning["sources"]}
    assert listed <= picker.pools[""].config.assembly.instances.keys()
    ready: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(picker.run(ready.set_result))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), task.exception()
        assert picker.serving.is_ready()
        assert all((ready.result().grpc, ready.result().health, ready.result().metrics))
        if case in PUBLISHED:
            request = OVER_GRPC if "grpc" in meaning["parsers"][0] else OVER_HTTP
            destination = await routed(ready.result().grpc, *request)
            assert all(one.startswith("127.0.0.1:") for one in destination.split(","))
        picker.stop()
        picker.stop()
        await task


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_configuration_starts_nothing(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose(options(tmp_path, case, REFUSED[case]))
    said = str(refusal.value)
    for error in REFUSED[case]["errors"]:
        assert error.partition(".in.yaml")[2] in said


def test_published_configurations_have_what_they_need_created() -> None:
    for case in ("published_optimized_baseline", "published_pd_disaggregation"):
        assert {"approx-prefix-cache-producer", "token-producer"} <= set(GOOD[case]["producers"])
    assert len(PUBLISHED) > 15
    assert not [name for name in REFUSED if name.startswith(("published_", "smoke_"))]
