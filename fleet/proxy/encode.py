"""The encode step of a request with media, before its prefill and decode.

The header `x-encoder-hosts-ports` names encoders, which compute the embeddings of images, audio and
video and hold them for the workers that run the prompt. Each item of a chat is sent to one of them,
in turn, as a request of its own. With `ec-nixl` their answers say where the embeddings are, and the
request takes that along; with `ec-example` they are in a storage that the workers share.

Unlike a prefill, a step that fails ends its request: the worker may be unable to encode.
"""

import asyncio
import logging
import uuid
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from base.forwarding import Headers, json_headers
from base.tracing import RequestTrace, call_of
from fleet.proxy.forward import TRACE
from worker.api.routes.prefill_leg import REQUEST_ID_HEADER, PrefillLeg, decoded
from worker.errors import RequestError, root_cause

logger = logging.getLogger(__name__)

ENCODE_SPAN = "llm_d.pd_proxy.encode"
ENCODERS_HEADER = "x-encoder-hosts-ports"
_PATH = "/v1/chat/completions"
_PARAMS = "ec_transfer_params"
_MEDIA = ("image_url", "audio_url", "video_url", "input_audio")
# What an item's embeddings depend on. An encoder may refuse other fields, such as tools.
_PASSED_ON = ("model", "mm_processor_kwargs", "media_io_kwargs")
_ITEMS_AT_ONCE = 8  # of one request, as in llm-d's coordinator
_LONGEST_REASON = 500

Json = dict[str, Any]


class EncodeStep:
    """Has media encoded, with `ec-nixl` or `ec-example` as its connector. `leg` knows which
    addresses may be asked; the whole step of one request takes at most `timeout_seconds`.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        leg: PrefillLeg,
        connector: str,
        timeout_seconds: float,
    ) -> None:
        self._session = session
        self._leg = leg
        self._hands_over = connector == "ec-nixl"
        self._timeout_seconds = timeout_seconds

    async def next_body(self, request: web.Request, headers: Headers, body: bytes) -> bytes:
        """Return the body for the next step: `body` itself where it has no media, or no header
        names encoders. These get `headers`, to which an id is added if they have none. Raises
        `RequestError`: 403 if an encoder may not be asked, 502 if one fails.
        """
        body = without_location(body)
        named = ",".join(request.headers.getall(ENCODERS_HEADER, ()))
        if not named or (request.method, request.path) != ("POST", _PATH):
            return body
        encoders = self._encoders(named)
        asked = decoded(body) or {}
        items = items_of(asked)
        if not encoders or not items:
            return body
        passed_on = {name: asked[name] for name in _PASSED_ON if name in asked}
        bodies = [passed_on | _body_of(item) for item in items]
        found = await self._encoded(request.get(TRACE), encoders, headers, bodies)
        if not self._hands_over:
            return msgspec.json.encode(asked | {"cache_hit_threshold": 0})
        locations = {name: value for each in found for name, value in each.items()}
        return msgspec.json.encode(asked | {_PARAMS: locations}) if locations else body

    def _encoders(self, named: str) -> list[str]:
        encoders = [one.strip() for one in named.split(",") if one.strip()]
        for encoder in encoders:
            try:
                self._leg.prefiller(encoder)
            except RequestError as error:
                reason = (
                    f"{ENCODERS_HEADER} {encoder} is not the IP address and port of a worker in"
                    " --prefiller-networks"
                )
                raise RequestError(reason, status=error.status, type=error.type) from error
        return encoders

    async def _encoded(
        self, trace: RequestTrace | None, encoders: list[str], headers: Headers, bodies: list[Json]
    ) -> list[Json]:
        """Return the `ec_transfer_params` of each item; the first failure cancels the others."""
        request_id = identified(headers)
        others = [pair for pair in headers if pair[0].lower() != REQUEST_ID_HEADER]
        slots = asyncio.Semaphore(_ITEMS_AT_ONCE)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds

        async def post(index: int, body: Json) -> Json:
            encoder = encoders[index % len(encoders)]
            within = [*others, (REQUEST_ID_HEADER, f"{request_id}-enc-{index}")]
            url = f"http://{encoder}{_PATH}"
            async with slots:
                with call_of(trace, ENCODE_SPAN, within, url=url) as spanned:
                    return await self._post(url, encoder, spanned, body, deadline)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(post(index, body), name=f"encode {index}")
                    for index, body in enumerate(bodies)
                ]
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        return [task.result() for task in tasks]

    async def _post(
        self, url: str, encoder: str, headers: Headers, body: Json, deadline: float
    ) -> Json:
        try:
            async with (
                asyncio.timeout_at(deadline),
                self._session.post(
                    url,
                    data=msgspec.json.encode(body),
                    headers=json_headers(headers),
                    allow_redirects=False,
                ) as answer,
            ):
                said = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            # A TimeoutError is an OSError.
            raise _failed(encoder, str(error) or "it takes too long") from error
        if answer.status != 200:
            text = said[:_LONGEST_REASON].decode(errors="replace")
            raise _failed(encoder, f"it answers {answer.status}: {text}")
        if not self._hands_over:
            return {}
        parsed = decoded(said)
        if parsed is None:
            raise _failed(encoder, "its answer is no JSON object")
        locations = parsed.get(_PARAMS)
        if isinstance(locations, dict) and locations:
            return locations
        logger.warning("encoder %s does not say where it holds the embeddings", encoder)
        return {}


def _failed(encoder: str, reason: str) -> RequestError:
    message = f"encoder {encoder} failed: {reason}"
    logger.warning("%s", message)
    return RequestError(message, status=502, type="BadGateway")


def identified(headers: Headers) -> str:
    """Return the request's id, which is made and added to `headers` if they have none."""
    for name, value in headers:
        if name.lower() == REQUEST_ID_HEADER:
            return value
    made = str(uuid.uuid1())
    headers.append((REQUEST_ID_HEADER, made))
    return made


def items_of(asked: Json) -> list[Json]:
    """Return the media of a chat's messages in their order, those of one URL once."""
    messages = _objects(asked.get("messages"))
    parts = [part for message in messages for part in _objects(message.get("content"))]
    seen: set[str] = set()
    items = []
    for item in parts:
        kind = item.get("type")
        if kind not in _MEDIA:
            continue
        given = item.get(kind)
        url = given.get("url") if isinstance(given, dict) else given
        if isinstance(url, str):
            if url in seen:
                continue
            seen.add(url)
        items.append(item)
    return items


def _objects(value: object) -> list[Json]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _body_of(item: Json) -> Json:
    messages = [{"role": "user", "content": [item]}]
    return {"messages": messages, "max_tokens": 1, "stream": False}


def without_location(body: bytes) -> bytes:
    """Drop the field that says where embeddings are: workers connect there, so only we may set it.
    Raises `RequestError` if the body may have the field but cannot be read.
    """
    # The field, unless it is spelled with escapes.
    if b"\\u" not in body and _PARAMS.encode() not in body:
        return body
    try:
        asked = msgspec.json.decode(body, type=dict[str, msgspec.Raw])  # as lenient as any worker
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the body is no JSON object: {error}") from error
    if _PARAMS not in asked:
        return body
    return msgspec.json.encode({name: raw for name, raw in asked.items() if name != _PARAMS})
