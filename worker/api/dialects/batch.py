"""`POST /v1/chat/completions/batch`: several conversations, with one choice for each."""

import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated

from worker.api.generate.prepared import Prepared
from worker.api.http.arrival import Arrival
from worker.api.http.field_errors import fields_named
from worker.api.routes.generation import GenerationRoutes
from worker.api.schema.answers import ChatCompletion
from worker.api.schema.parse import decode_supported
from worker.api.schema.requests import MAX_PROMPTS, ChatMessage, ChatRequest, fields_shared, says
from worker.api.schema.routes import Handler, Route
from worker.errors import RequestError


class BatchChatRequest(ChatRequest):
    """Body of `POST /v1/chat/completions/batch`: several conversations, one answer to each."""

    messages: Annotated[  # type: ignore[assignment]
        list[list[ChatMessage]], says(minItems=1, maxItems=MAX_PROMPTS)
    ]


async def _prepared(generation: GenerationRoutes, body: bytes, arrival: Arrival) -> Prepared:
    request = decode_supported(body, BatchChatRequest)
    conversations = request.messages
    for name, value in (("stream", request.stream), ("tools", request.tools)):
        if value:
            raise RequestError(f"Batches do not support `{name}`; leave it out", param=name)
    if request.n not in (None, 1):
        raise RequestError("Batches do not support `n` above 1; leave it out", param="n")
    if not 1 <= len(conversations) <= MAX_PROMPTS:
        reason = f"messages takes 1 to {MAX_PROMPTS} conversations, got {len(conversations)}"
        raise RequestError(reason, param="messages")
    name = arrival.request_id or request.request_id or secrets.token_hex(16)
    arrival = replace(arrival, request_id=name)
    fields = fields_shared(request, ChatRequest)
    prepared = []
    for n, conversation in enumerate(conversations):
        with fields_named({"messages": f"messages[{n}]"}):
            chat = ChatRequest(**fields | {"messages": conversation})
            prepared.append(await generation.chat.prepared(chat, arrival))
    asks = tuple(ask for one in prepared for ask in one.requests)
    return replace(prepared[0], requests=asks)


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions/batch",
        "chat_batch",
        "Answer several conversations, a choice for each",
        BatchChatRequest,
        ChatCompletion,
        statuses=(404, 503),
    ),
)


def handlers(generation: GenerationRoutes) -> dict[str, Handler]:
    return {"chat_batch": generation.handler(partial(_prepared, generation))}
