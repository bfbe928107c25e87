"""The picker's stages of a request with images, run by the sidecar behind a real Envoy."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleet.envoy.bootstrap import build, to_yaml
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from tests.support.fleet.envoy_process import EnvoyProcess
from tests.support.fleet.sidecar_house import ASKED, CHAT, CHUNKS, SOURCE, House
from tests.support.local_ports import free_port
from tests.support.picker.metrics_pages import Pod
from tests.support.picker.whole_picker import HEAD, whole_picker
from tests.support.waiting import until
from tests.support.web_server import Server

pytestmark = pytest.mark.envoy
LOCAL = "127.0.0.1"
CONFIG = (
    HEAD
    + """
plugins:
- type: disagg-profile-handler
  parameters:
    deciders: {encode: always-disagg-multimodal-decider, prefill: always-disagg-pd-decider}
- {type: always-disagg-multimodal-decider}
- {type: always-disagg-pd-decider}
- {type: encode-filter}
- {type: prefill-filter}
- {type: decode-filter}
- {type: max-score-picker, name: two, parameters: {maxNumOfEndpoints: 2}}
schedulingProfiles:
- {name: encode, plugins: [{pluginRef: encode-filter}, {pluginRef: two}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""
)
IMAGES = [
    {"type": "image_url", "image_url": {"url": url}}
    for url in ("data:image/png;base64,iVBORw0KGgo=", "https://images.example/cat.png")
]


async def encodes(request: web.Request) -> web.StreamResponse:
    if request.method != "POST":
        return web.Response()
    (message,) = (await request.json())["messages"]
    (item,) = message["content"]
    return web.json_response({"ec_transfer_params": {item["image_url"]["url"]: {"at": 1}}})


def posts(server: Server) -> list[tuple[dict[str, str], Any]]:
    return [
        (headers, json.loads(body))
        for method, path, headers, body in server.asked
        if (method, path) == ("POST", CHAT)
    ]


async def test_the_pickers_stages_are_the_sidecars_steps(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        house = await House(stack).start(ec_connector="ec-nixl")
        encoders = [await stack.enter_async_context(Server(encodes).serving()) for _ in range(2)]
        decode_port = int(house.url.rpartition(":")[2])
        picker = await stack.enter_async_context(whole_picker(tmp_path, config=CONFIG))
        addresses = {"prefill": house.prefiller.address, "decode": f"{LOCAL}:{decode_port}"}
        addresses |= {f"encode-{n}": one.address for n, one in enumerate(encoders)}
        picker.list_endpoints(
            [
                Pod(
                    *(name, LOCAL, None, {"llm-d.ai/role": name.partition("-")[0]}),
                    port=int(address.rpartition(":")[2]),
                )
                for name, address in addresses.items()
            ]
        )
        await until(picker.endpoints, lambda rows: rows.keys() == addresses.keys())
        config = BootstrapConfig(
            listen=SocketAddress(LOCAL, free_port()),
            admin=SocketAddress(LOCAL, free_port()),
            picker=SocketAddress(LOCAL, picker.ports.grpc),
            picker_health=SocketAddress(LOCAL, picker.ports.health),
            endpoints=(SocketAddress(LOCAL, decode_port),),
            buffer_request_body=True,
            message_timeout_seconds=60.0,
        )
        envoy = EnvoyProcess(tmp_path, config.admin.port)  # type: ignore[union-attr]
        stack.push_async_callback(envoy.stop)
        await envoy.start(to_yaml(build(config)))
        await envoy.until_ready()
        await envoy.until_healthy("picker", 1)
        await envoy.until_healthy("pool", 1)

        body = ASKED | {"messages": [{"role": "user", "content": IMAGES}]}
        # A forged list would be a 403, if it arrived.
        forged = {"x-encoder-hosts-ports": "8.8.8.8:80"}
        url = f"{config.listen.url}{CHAT}"
        async with house.client.post(url, json=body, headers=forged) as answer:
            assert (answer.status, await answer.read()) == (200, b"".join(CHUNKS))

        encoded = [(headers, sent) for one in encoders for headers, sent in posts(one)]
        assert [len(posts(one)) for one in encoders] == [1, 1]
        items = [sent["messages"][0]["content"] for _, sent in encoded]
        assert sorted(map(str, items)) == sorted(str([image]) for image in IMAGES)
        ((prefill_headers, prefill),) = posts(house.prefiller)
        ((decode_headers, decode),) = posts(house.decoder)
        params = {image["image_url"]["url"]: {"at": 1} for image in IMAGES}  # type: ignore[index]
        expected = body | {"ec_transfer_params": params}
        assert decode == expected | {"kv_transfer_params": SOURCE}
        assert (prefill["ec_transfer_params"], prefill["max_tokens"]) == (params, 1)
        named = {"x-encoder-hosts-ports", "x-prefiller-host-port"}
        for headers in (prefill_headers, decode_headers, *(one for one, _ in encoded)):
            assert headers.keys().isdisjoint(named)
        ids = {headers["x-request-id"] for headers, _ in encoded}
        assert ids == {f"{decode_headers['x-request-id']}-enc-{n}" for n in range(2)}
