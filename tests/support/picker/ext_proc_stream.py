"""An ext_proc stream as a gateway in full-duplex mode opens it, and the messages it may expect."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from google.protobuf.struct_pb2 import Struct

PATIENCE_SECONDS = 120.0
CHUNK_BYTES = 62_000
DESTINATION = "x-gateway-destination-endpoint"
REQUEST_ID = "test-request-id"
BASE_HEADERS = {"hi": "mom", "x-request-id": REQUEST_ID, ":method": "POST", ":authority": "gw"}
BOTH_WAYS_REMOVED = (
    "x-gateway-destination-endpoint-scores",
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "x-gateway-model-name-rewrite",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-inference-objective",
    "x-llm-d-model-name-rewrite",
    "x-llm-d-request-dropped-reason",
    "x-llm-d-slo-tpot-ms",
    "x-llm-d-slo-ttft-ms",
    "x-llm-d-video-duration-seconds",
    "x-llm-d-video-fps",
    "x-llm-d-video-resolution",
    "x-slo-tpot-ms",
    "x-slo-ttft-ms",
)
DISAGGREGATION = (
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-prefiller-host-port",
)
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
Message = Any  # the wheel with Envoy's messages carries no types


def completion(model: str = "my-model", prompt: str = "test", **more: Any) -> bytes:
    return json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": 100, "temperature": 0} | more
    ).encode()


# What the picker is expected to say


def set_headers(mutation: Message, headers: Iterable[tuple[str, str]]) -> None:
    for key, value in sorted(headers):
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = key, value.encode()


def struct_of(values: Mapping[str, Any]) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


def directed(
    destination: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    has_length: bool = True,
) -> list[Message]:
    message = pb.ProcessingResponse()
    response = message.request_headers.response
    response.clear_route_cache = True
    own = {DESTINATION: destination, **(headers or {})}
    if body and has_length:
        own["content-length"] = str(len(body))
    set_headers(response.header_mutation, own.items())
    removed = sorted({*BOTH_WAYS_REMOVED, *DISAGGREGATION} - own.keys())
    response.header_mutation.remove_headers.extend(removed)
    balanced = {DESTINATION: destination, **(metadata or {})}
    message.dynamic_metadata.CopyFrom(struct_of({"envoy.lb": balanced}))
    return [message] if body is None else [message, *body_pieces("request_body", body)]


def response_pieces(
    body: bytes, ends: bool = True, metadata: Mapping[str, Any] | None = None
) -> list[Message]:
    messages = body_pieces("response_body", body, ends)
    if metadata is not None:
        messages[-1].dynamic_metadata.CopyFrom(struct_of(metadata))
    return messages


def body_pieces(
    kind: str, body: bytes, ends: bool = True, size: int = CHUNK_BYTES
) -> list[Message]:
    messages = []
    starts = range(0, max(len(body), 1), size)
    for at in starts:
        message = pb.ProcessingResponse(**{kind: pb.BodyResponse()})
        streamed = getattr(message, kind).response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = body[at : at + size], ends and at == starts[-1]
        messages.append(message)
    return messages


def response_head(
    headers: Mapping[str, str] | None = None, removed: Iterable[str] = ()
) -> list[Message]:
    message = pb.ProcessingResponse()
    message.response_headers.SetInParent()
    if headers or removed:
        mutation = message.response_headers.response.header_mutation
        set_headers(mutation, (headers or {}).items())
        mutation.remove_headers.extend(sorted(removed))
    return [message]


RESPONSE_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def refused(
    status: int,
    kind: str,
    text: str,
    drop_reason: str | None = None,
    retry_after: int | None = None,
) -> list[Message]:
    message = pb.ProcessingResponse()
    said = message.immediate_response
    error = {"message": text, "type": kind, "param": None, "code": status}
    said.status.code, said.details = status, "endpoint_picker"
    said.body = json.dumps({"error": error}).encode()
    headers = [("content-type", "application/json")]
    if drop_reason is not None:
        headers.append(("x-llm-d-request-dropped-reason", drop_reason))
    if retry_after is not None:
        headers.append(("retry-after", str(retry_after)))
    set_headers(said.headers, headers)
    return [message]


def in_order(message: Message) -> Message:
    kind = message.WhichOneof("response")
    mutations = []
    if kind == "immediate_response":
        mutations = [message.immediate_response.headers]
    elif kind in ("request_headers", "request_body", "response_headers", "response_body"):
        response = getattr(message, kind).response
        mutations = [response.header_mutation] if response.HasField("header_mutation") else []
    for mutation in mutations:
        mutation.set_headers.sort(key=lambda option: option.header.key)
        mutation.remove_headers.sort()
    return message


# What the gateway says


class GatewayStream:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = pb_grpc.ExternalProcessorStub(channel).Process()

    async def send(self, metadata: Mapping[str, Any] | None = None, **message: Message) -> None:
        sent = pb.ProcessingRequest(**message)
        for namespace, values in (metadata or {}).items():
            sent.metadata_context.filter_metadata[namespace].CopyFrom(struct_of(values))
        await self.call.write(sent)

    async def request_headers(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        path: str = "/v1/completions",
        ends: bool = False,
        metadata: Mapping[str, Any] | None = None,
        modes: tuple[int, int] | None = None,
    ) -> None:
        """`modes` are those of the request's and of the response's bodies."""
        message = pb.HttpHeaders(end_of_stream=ends)
        for key, value in {":path": path, **BASE_HEADERS, **(headers or {})}.items():
            message.headers.headers.add(key=key, raw_value=value.encode())
        more = {}
        if modes is not None:
            request, response = modes
            more["protocol_config"] = pb.ProtocolConfiguration(
                request_body_mode=request, response_body_mode=response
            )
        await self.send(metadata, request_headers=message, **more)

    async def request_body(
        self, body: bytes, ends: bool = True, metadata: Mapping[str, Any] | None = None
    ) -> None:
        await self.send(metadata, request_body=pb.HttpBody(body=body, end_of_stream=ends))

    async def response_headers(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        ends: bool = False,
        served: str | None = None,
    ) -> list[Message]:
        message = pb.HttpHeaders(end_of_stream=ends)
        shown = {":status": "200", "content-type": "application/json", **(headers or {})}
        for key, value in shown.items():
            message.headers.headers.add(key=key, raw_value=value.encode())
        metadata = {"envoy.lb": {f"{DESTINATION}-served": served}} if served else None
        await self.send(metadata, response_headers=message)
        return await self.read(1)

    async def response_body(self, body: bytes, ends: bool = False) -> None:
        await self.send(response_body=pb.HttpBody(body=body, end_of_stream=ends))

    async def response_trailers(self) -> None:
        await self.send(response_trailers=pb.HttpTrailers())

    async def read(self, number: int) -> list[Message]:
        found: list[Message] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found) < number:
                message = await self.call.read()
                if message is grpc.aio.EOF:
                    break
                found.append(in_order(message))
        return found

    async def read_request(self) -> list[Message]:
        return await self._read_until(_ends_request)

    async def read_response(self) -> list[Message]:
        return await self._read_until(_ends_response)

    async def _read_until(self, is_last: Callable[[Message], bool]) -> list[Message]:
        found: list[Message] = []
        while True:
            messages = await self.read(1)
            found += messages
            if not messages or is_last(messages[0]):
                return found

    async def rest(self) -> list[Message]:
        await self.call.done_writing()
        return await self.read(10_000)

    async def ask(
        self,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        path: str = "/v1/completions",
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Message]:
        await self.request_headers(headers, path=path)
        await self.request_body(body, metadata=metadata)
        return await self.read_request()

    async def respond(
        self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None
    ) -> bytes:
        await self.response_headers(headers)
        for index, piece in enumerate(pieces):
            await self.response_body(piece, ends=index == len(pieces) - 1)
        return body_of(await self.read_response())


def _ends_request(message: Message) -> bool:
    kind = message.WhichOneof("response")
    if kind == "request_body":
        return bool(message.request_body.response.body_mutation.streamed_response.end_of_stream)
    return bool(kind == "immediate_response")


def _ends_response(message: Message) -> bool:
    if message.WhichOneof("response") != "response_body":
        return True
    return bool(message.response_body.response.body_mutation.streamed_response.end_of_stream)


def body_of(messages: Iterable[Message]) -> bytes:
    pieces = []
    for message in messages:
        kind = message.WhichOneof("response")
        if kind in ("request_body", "response_body"):
            mutation = getattr(message, kind).response.body_mutation
            pieces.append(mutation.streamed_response.body)
    return b"".join(pieces)


def destination_of(messages: Sequence[Message]) -> str:
    head = messages[0]
    options = head.request_headers.response.header_mutation.set_headers
    values = [one.header.raw_value.decode() for one in options if one.header.key == DESTINATION]
    fields = head.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    hint = str(fields[DESTINATION].string_value)
    assert values == [hint], head
    return hint
