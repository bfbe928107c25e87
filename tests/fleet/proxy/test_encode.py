"""The encode step of a sidecar: requests to encoders like vLLM's, and the steps after it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from base.tracing import Traced
from fleet.command_lines import parser_of
from fleet.proxy.encode import ENCODE_SPAN, items_of
from tests.support.fleet.sidecar_house import (
    ASKED,
    CHAT,
    CHUNKS,
    SOURCE,
    House,
    dies,
    hangs,
    refuses,
)
from tests.support.waiting import until
from tests.support.web_server import Handler, Server

INLINE = "data:image/png;base64,iVBORw0KGgo="
REMOTE = "https://images.example/cat.png"
TEXT = {"type": "text", "text": "What is this?"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def media(url: str, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
INLINE_IMAGE, REMOTE_IMAGE = media(INLINE), media(REMOTE)


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {**ASKED, "messages": [{"role": "user", "content": one} for one in contents], **fields}


def location(item: Any) -> dict[str, Any]:
    """vLLM's: by the item's hash, where the embeddings are."""
    key = f"hash of {json.dumps(item)}"
    return {key: {"num_encoder_tokens": 4, "remote_host": "10.0.0.1", "remote_port": 5700}}


async def encodes(request: web.Request) -> web.StreamResponse:
    (message,) = (await request.json())["messages"]
    (item,) = message["content"]
    return web.json_response({"choices": [], "ec_transfer_params": location(item)})


async def keeps_them(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": []})


class Encoders:
    """A sidecar's workers, and encoders beside them."""

    def __init__(self, house: House, encoders: Sequence[Server]) -> None:
        self.house = house
        self.encoders = encoders

    @property
    def named(self) -> str:
        return ", ".join(one.address for one in self.encoders)

    async def ask(
        self, body: Any, encoders: str | None = None, prefiller: str = "", **headers: str
    ) -> tuple[int, bytes]:
        """POST a chat, which has no prefill unless `prefiller` names its worker."""
        named = self.named if encoders is None else encoders
        named_workers = {"x-encoder-hosts-ports": named, "x-prefiller-host-port": prefiller}
        return await self.house.ask(body, **named_workers, **headers)

    def leg(self, server: Server) -> dict[str, Any]:
        """The body of the only request to a server, which has no header of the picker's."""
        ((method, path, headers, body),) = server.asked
        assert (method, path) == ("POST", CHAT)
        assert headers.keys().isdisjoint({"x-encoder-hosts-ports", "x-prefiller-host-port"})
        said = json.loads(body)
        assert isinstance(said, dict)
        return said


@pytest.fixture
async def scene(house: House) -> AsyncIterator[Encoders]:
    """Two encoders; the sidecar is to be started."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server(encodes).serving()) for _ in range(2)]
        yield Encoders(house, servers)


def items_at(server: Server) -> list[Any]:
    return [json.loads(body)["messages"][0]["content"][0] for _, _, _, body in server.asked]


async def test_encode_prefill_and_decode_follow_each_other(scene: Encoders) -> None:
    """Encoders get one token's request for each item, in turn; later steps get the locations, and
    the decode worker the client's own limits.
    """
    house = await scene.house.start(ec_connector="ec-nixl")
    body = chat(
        [TEXT, INLINE_IMAGE, REMOTE_IMAGE], [SOUND, REMOTE_IMAGE], tools=TOOLS, n=2, top_p=0.5
    ) | {"mm_processor_kwargs": {"max_pixels": 9}, "max_completion_tokens": 9}
    named = {"prefiller": house.prefiller.address, "x-request-id": "mine"}
    answer = await scene.ask(body, **named, authorization="Bearer k")
    assert answer == (200, b"".join(CHUNKS))

    first, second = scene.encoders
    assert sorted(map(str, items_at(first))) == sorted(map(str, [INLINE_IMAGE, SOUND]))
    assert items_at(second) == [REMOTE_IMAGE]
    order = {"mine-enc-0": INLINE_IMAGE, "mine-enc-1": REMOTE_IMAGE, "mine-enc-2": SOUND}
    for method, path, headers, encode in (*first.asked, *second.asked):
        assert (method, path, headers["authorization"]) == ("POST", CHAT, "Bearer k")
        assert headers["content-type"] == "application/json"
        assert headers.keys().isdisjoint({"x-encoder-hosts-ports", "x-prefiller-host-port"})
        assert json.loads(encode) == {
            "model": "m",
            "messages": [{"role": "user", "content": [order.pop(headers["x-request-id"])]}],
            "mm_processor_kwargs": {"max_pixels": 9},
            "max_tokens": 1,
            "stream": False,
        }
    assert not order

    places = location(INLINE_IMAGE) | location(REMOTE_IMAGE) | location(SOUND)
    prefill, decode = scene.leg(house.prefiller), scene.leg(house.decoder)
    assert prefill["ec_transfer_params"] == places
    assert (prefill["max_tokens"], prefill["min_tokens"], prefill["stream"]) == (1, 1, False)
    expected = body | {"ec_transfer_params": places, "kv_transfer_params": SOURCE}
    assert decode == expected
    for server in (house.prefiller, house.decoder):
        assert server.asked[0][2]["x-request-id"] == "mine"


async def test_the_steps_share_one_request_id(scene: Encoders) -> None:
    ids: list[str] = []

    async def notes_ids(request: web.Request) -> web.StreamResponse:
        ids.extend(request.headers.getall("x-request-id"))
        return await encodes(request)

    scene.encoders[0].behave = notes_ids
    house = await scene.house.start(ec_connector="ec-nixl")
    await scene.ask(chat([REMOTE_IMAGE]), prefiller=house.prefiller.address)
    prefill, decode = (one.asked[0][2]["x-request-id"] for one in (house.prefiller, house.decoder))
    assert ids == [f"{prefill}-enc-0"]
    assert prefill == decode


async def test_a_request_is_decoded_after_its_encoding_alone(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    body = chat([REMOTE_IMAGE])
    assert await scene.ask(body) == (200, b"".join(CHUNKS))
    assert house.prefiller.asked == []
    assert scene.leg(house.decoder) == body | {"ec_transfer_params": location(REMOTE_IMAGE)}


async def test_ec_example_leaves_the_embeddings_in_shared_storage(scene: Encoders) -> None:
    """Then an answer of an encoder says nothing, not even in JSON."""

    async def stores(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"[1")

    house = await scene.house.start(ec_connector="ec-example")
    scene.encoders[0].behave = stores
    body = chat([INLINE_IMAGE, REMOTE_IMAGE], max_completion_tokens=4)
    assert (await scene.ask(body, prefiller=house.prefiller.address))[0] == 200
    assert [items_at(one) for one in scene.encoders] == [[INLINE_IMAGE], [REMOTE_IMAGE]]
    assert scene.leg(house.prefiller)["cache_hit_threshold"] == 0
    expected = body | {"cache_hit_threshold": 0, "kv_transfer_params": SOURCE}
    assert scene.leg(house.decoder) == expected


async def test_sglangs_workers_get_the_locations_too(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl", kv_connector="sglang")
    await scene.ask(chat([REMOTE_IMAGE]), prefiller=house.prefiller.address)
    await house.prefiller.arrived.wait()
    prefill, decode = scene.leg(house.prefiller), scene.leg(house.decoder)
    assert prefill == decode
    assert decode["ec_transfer_params"] == location(REMOTE_IMAGE)
    assert decode["bootstrap_port"] == 8998


@pytest.mark.parametrize("silent", [0, 1])
async def test_an_encoder_may_have_nothing_to_hand_over(scene: Encoders, silent: int) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    scene.encoders[silent].behave = keeps_them
    items = [INLINE_IMAGE, REMOTE_IMAGE]
    assert (await scene.ask(chat(items)))[0] == 200
    expected = location(items[1 - silent])
    assert scene.leg(house.decoder)["ec_transfer_params"] == expected


async def test_without_any_location_a_body_passes_as_it_is(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    for encoder in scene.encoders:
        encoder.behave = keeps_them
    body = json.dumps(chat([INLINE_IMAGE]), indent=3).encode()
    assert (await scene.ask(body))[0] == 200
    assert house.decoder.asked[0][3] == body


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (["text alone"], []),
        ([[TEXT]], []),
        ([[REMOTE_IMAGE]], [REMOTE_IMAGE]),
        ([[INLINE_IMAGE, TEXT], [REMOTE_IMAGE]], [INLINE_IMAGE, REMOTE_IMAGE]),
        (
            [[REMOTE_IMAGE, INLINE_IMAGE, REMOTE_IMAGE], [INLINE_IMAGE]],
            [REMOTE_IMAGE, INLINE_IMAGE],
        ),
        ([[SOUND, SOUND]], [SOUND, SOUND]),
        (
            [[media("a", "audio_url"), media("v", "video_url"), media("a", "audio_url")]],
            [media("a", "audio_url"), media("v", "video_url")],
        ),
        (
            [[{"type": "image_url", "image_url": "u"}] * 2],
            [{"type": "image_url", "image_url": "u"}],
        ),
        ([[{"type": ["image_url"]}, {"type": "image"}, "image_url", None], 7, None], []),
    ],
)
def test_items_are_found_in_their_order_and_each_url_once(contents: Any, found: Any) -> None:
    assert items_of(chat(*contents)) == found


@pytest.mark.parametrize("messages", [None, "image_url", {"content": [REMOTE_IMAGE]}, [[], 1]])
def test_messages_of_no_known_form_have_no_items(messages: Any) -> None:
    assert items_of({"messages": messages}) == []
    assert items_of({}) == []


async def redirects(_: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")


async def babbles(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"[1")


FAILURES = [
    (refuses, 'it answers 500: {"message": "no"}'),
    (dies, "Server disconnected"),
    (redirects, "it answers 307"),
]


@pytest.mark.parametrize(
    ("connector", "behave", "reason"),
    [
        *(("ec-nixl", *failure) for failure in FAILURES),
        *(("ec-example", *failure) for failure in FAILURES),
        ("ec-nixl", babbles, "its answer is no JSON object"),
    ],
)
async def test_a_failing_encoder_fails_the_request(
    scene: Encoders, connector: str, behave: Handler, reason: str
) -> None:
    house = await scene.house.start(ec_connector=connector)
    bad = scene.encoders[1]
    bad.behave = behave
    body = chat([INLINE_IMAGE, REMOTE_IMAGE])
    status, answer = await scene.ask(body, prefiller=house.prefiller.address)
    error = json.loads(answer)["error"]
    assert (status, error["type"], error["code"]) == (502, "BadGateway", 502)
    assert error["message"].startswith(f"encoder {bad.address} failed: {reason}")
    assert (house.prefiller.asked, house.decoder.asked) == ([], [])


async def test_a_slow_encoder_fails_the_request(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl", prefill_timeout=0.2)
    slow = scene.encoders[0]
    slow.behave = hangs
    status, answer = await scene.ask(chat([REMOTE_IMAGE]))
    message = json.loads(answer)["error"]["message"]
    assert (status, message) == (502, f"encoder {slow.address} failed: it takes too long")
    assert house.decoder.asked == []
    await asyncio.wait_for(slow.left.wait(), 60)


async def test_an_encoder_that_is_gone_fails_the_request(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    status, answer = await scene.ask(chat([REMOTE_IMAGE]), "127.0.0.1:1")
    assert (status, b"encoder 127.0.0.1:1 failed" in answer) == (502, True)
    assert house.decoder.asked == []


async def test_a_failure_ends_the_other_encodings(scene: Encoders) -> None:
    """The client gets it at once, and the slow encoder's request is cancelled."""
    slow, bad = scene.encoders

    async def refuses_after(request: web.Request) -> web.StreamResponse:
        await slow.arrived.wait()
        return await refuses(request)

    slow.behave, bad.behave = hangs, refuses_after
    await scene.house.start(ec_connector="ec-nixl")
    status, answer = await scene.ask(chat([INLINE_IMAGE, REMOTE_IMAGE]))
    assert (status, bad.address.encode() in answer) == (502, True)
    await asyncio.wait_for(slow.left.wait(), 60)


async def test_a_client_disconnect_ends_the_encodings(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    for encoder in scene.encoders:
        encoder.behave = hangs
    asking = asyncio.create_task(scene.ask(chat([INLINE_IMAGE, REMOTE_IMAGE])))
    for encoder in scene.encoders:
        await encoder.arrived.wait()
    asking.cancel()
    for encoder in scene.encoders:
        await asyncio.wait_for(encoder.left.wait(), 60)
    assert house.decoder.asked == []


async def test_a_request_has_at_most_eight_encodings_at_once(scene: Encoders) -> None:
    may_end = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        await may_end.wait()
        return await encodes(request)

    first, second = scene.encoders
    first.behave = second.behave = waits
    house = await scene.house.start(ec_connector="ec-nixl")
    items = [media(f"https://images.example/{index}") for index in range(20)]
    asking = asyncio.create_task(scene.ask(chat(items)))
    await until(lambda: len(first.asked) + len(second.asked), lambda count: count >= 8)
    async with house.client.get(f"{house.url}/metrics") as answer:  # long enough for one more
        assert answer.status == 200
    assert len(first.asked) + len(second.asked) == 8
    may_end.set()
    assert (await asking)[0] == 200
    assert len(json.loads(house.decoder.asked[-1][3])["ec_transfer_params"]) == 20


@pytest.mark.parametrize(
    "forbidden", ["8.8.8.8:80", "169.254.169.254:80", "host:80", "127.0.0.1:80/x?", "127.0.0.1"]
)
async def test_only_allowed_encoders_are_asked(scene: Encoders, forbidden: str) -> None:
    """One that is not allowed refuses the request, whatever its place in the list."""
    house = await scene.house.start(ec_connector="ec-nixl")
    for named in (forbidden, f"{scene.named},{forbidden}"):
        status, answer = await scene.ask(chat([REMOTE_IMAGE]), named)
        error = json.loads(answer)["error"]
        assert (status, error["type"]) == (403, "Forbidden")
        assert error["message"].startswith(f"x-encoder-hosts-ports {forbidden} ")
    headers = [("x-encoder-hosts-ports", scene.named), ("x-encoder-hosts-ports", forbidden)]
    async with house.client.post(house.url + CHAT, json=chat([TEXT]), headers=headers) as answered:
        assert answered.status == 403
    asked = [one.asked for one in (*scene.encoders, house.decoder)]
    assert asked == [[], [], []]


async def test_networks_can_be_named(scene: Encoders) -> None:
    await scene.house.start(ec_connector="ec-nixl", prefiller_networks=("10.0.0.0/8",))
    assert (await scene.ask(chat([REMOTE_IMAGE])))[0] == 403


@pytest.mark.parametrize(
    ("connector", "contents", "encoders"),
    [
        (None, [[REMOTE_IMAGE]], None),
        (None, [[REMOTE_IMAGE]], "8.8.8.8:80"),
        ("ec-nixl", ["text alone"], None),
        ("ec-example", [[TEXT]], None),
        ("ec-nixl", [[REMOTE_IMAGE]], ""),
        ("ec-nixl", [[REMOTE_IMAGE]], " , "),
    ],
)
async def test_other_requests_pass_as_they_are(
    scene: Encoders, connector: str | None, contents: Any, encoders: str | None
) -> None:
    house = await scene.house.start(ec_connector=connector)
    body = json.dumps(chat(*contents), indent=3).encode()
    assert await scene.ask(body, encoders) == (200, b"".join(CHUNKS))
    assert house.decoder.asked[0][3] == body
    assert "x-encoder-hosts-ports" not in house.decoder.asked[0][2]
    assert [one.asked for one in scene.encoders] == [[], []]


async def test_other_paths_and_bodies_are_the_decoders(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    named = {"x-encoder-hosts-ports": scene.named, "x-prefiller-host-port": ""}
    for path, body in (
        ("/v1/responses", chat([REMOTE_IMAGE])),
        ("/v1/completions", chat([REMOTE_IMAGE])),
        (CHAT, b"{"),
        (CHAT, b""),
    ):
        assert (await house.ask(body, path, **named))[0] == 200
        _, _, headers, sent = house.decoder.asked.pop()
        assert sent == (body if isinstance(body, bytes) else json.dumps(body).encode())
        assert "x-encoder-hosts-ports" not in headers
    assert [one.asked for one in scene.encoders] == [[], []]


@pytest.mark.parametrize("spelling", ["ec_transfer_params", "ec\\u005ftransfer_params"])
@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_client_does_not_say_where_embeddings_are(
    scene: Encoders, spelling: str, is_packed: bool
) -> None:
    """The workers would connect to that address."""
    house = await scene.house.start(ec_connector="ec-nixl")
    body = json.dumps({**ASKED, "ec_transfer_params": location(1)}).encode()
    body = body.replace(b"ec_transfer_params", spelling.encode())
    data, headers = (gzip.compress(body), {"content-encoding": "gzip"}) if is_packed else (body, {})
    async with house.client.post(house.url + CHAT, data=data, headers=headers) as answer:
        assert answer.status == 200
    assert json.loads(house.decoder.asked[0][3]) == ASKED


async def test_a_body_that_may_name_embeddings_has_to_be_readable(scene: Encoders) -> None:
    house = await scene.house.start(ec_connector="ec-nixl")
    body = json.dumps({**ASKED, "ec_transfer_params": {}}).encode()
    assert (await scene.ask(body + b"}"))[0] == 400
    assert house.decoder.asked == []


async def test_without_a_connector_locations_are_anothers_to_give(scene: Encoders) -> None:
    """Such as llm-d's coordinator, which runs the encode step before the sidecar."""
    house = await scene.house.start()
    body = {**ASKED, "ec_transfer_params": location(1)}
    await scene.ask(body)
    assert scene.leg(house.decoder) == body


async def test_each_encoding_is_a_span_of_its_request(scene: Encoders) -> None:
    otel = pytest.importorskip("base.otel")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    traced = Traced("sidecar", "pointsman-sidecar", "request")
    always = {"OTEL_TRACES_SAMPLER_ARG": "1"}
    tracing = otel.tracing_with(exporter, always, traced, in_background=False)
    await scene.house.start(tracing, ec_connector="ec-nixl")
    scene.encoders[1].behave = refuses
    body = chat([INLINE_IMAGE, REMOTE_IMAGE])
    assert (await scene.ask(body))[0] == 502
    spans = exporter.get_finished_spans()
    (request,) = [span for span in spans if span.name == "request"]
    encodings = {
        span.attributes["url"]: span
        for span in spans
        if span.name == ENCODE_SPAN and span.parent.span_id == request.context.span_id
    }
    first, second = (f"http://{one.address}{CHAT}" for one in scene.encoders)
    assert encodings.keys() == {first, second}
    assert encodings[second].status.description == "RequestError"
    sent = scene.encoders[1].asked[0][2]["traceparent"]
    assert f"{encodings[second].context.span_id:016x}" in sent


def test_the_flag_names_a_connector() -> None:
    read = parser_of("sidecar").parse_args
    assert read([]).ec_connector is None
    assert read(["--ec-connector", "ec-example"]).ec_connector == "ec-example"
    with pytest.raises(SystemExit):
        read(["--ec-connector", "nixl"])
