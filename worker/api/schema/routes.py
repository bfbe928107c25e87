"""The table of routes, by which the server dispatches and which the OpenAPI document describes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import msgspec

from base.shelves import load_shelf
from worker.api.http.exchange import OPENAI_ERRORS, ErrorForm, Exchange
from worker.api.schema import answers as answers
from worker.api.schema import embeddings
from worker.api.schema.requests import (
    AbortBody,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    LoadAdapterBody,
    TokenizeRequest,
    UnloadAdapterBody,
)
from worker.config import ApiConfig
from worker.errors import RequestError

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Query:
    """A field of the query string, which may be repeated if it is `many`."""

    name: str
    kind: Any
    default: Any
    summary: str
    many: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one exact path, or on `MODEL_PATH`.

    `body` and `answer` are the types of the JSON (a tuple: any of them; `answer` None: an empty
    body). `statuses` are the route's own, besides 200. `switch` is the field of `ApiConfig` that
    turns the route on. A `guarded` route asks for an API key where there are any, whatever its
    path.
    """

    method: str
    path: str
    name: str
    summary: str
    body: Any = None
    answer: Any = None
    media_type: str = "application/json"
    streams: bool = False
    query: tuple[Query, ...] = ()  # without any, all are ignored: probes add their own
    statuses: tuple[int, ...] = ()
    switch: str | None = None
    guarded: bool = False  # outside /v1, for what costs or reveals something
    errors: ErrorForm = OPENAI_ERRORS

    def is_served(self, config: ApiConfig) -> bool:
        return self.switch is None or bool(getattr(config, self.switch))


_MODELS = "/v1/models/"
MODEL_PATH = _MODELS + "{id}"

_COMMAND = (503,)
_MODE = "abort ends what is in flight, wait lets it finish, keep freezes it"


def generation_route(path: str, name: str, summary: str, body: Any, answer: Any) -> Route:
    return Route("POST", path, name, summary, body, answer, streams=True, statuses=(404, 503))


def text_route(path: str, name: str, summary: str, body: Any, answer: Any) -> Route:
    return Route("POST", path, name, summary, body, answer, statuses=(404,))


def _pooling_route(path: str, name: str, summary: str, body: Any, answer: Any) -> Route:
    return Route("POST", path, name, summary, body, answer, statuses=(404, 503))


def _probe(path: str, summary: str, answer: Any = None, name: str = "", **more: Any) -> Route:
    """Return a route of GET, by default named as its path."""
    return Route("GET", path, name or path[1:], summary, answer=answer, **more)


def _admin(method: str, path: str, summary: str, answer: Any, *query: Query) -> Route:
    """Return a route of operators, of which those of POST run a command."""
    return Route(
        method,
        path,
        path[1:].replace("/", "_"),
        summary,
        answer=answer,
        query=query,
        statuses=_COMMAND if method == "POST" else (),
        switch="enable_admin_routes",
        guarded=True,
    )


_BODIES = (ChatRequest, CompletionRequest, GenerateRequest)
_ANSWERS = (answers.ChatCompletion, answers.TextCompletion, answers.Generated)
_CHAT, _TEXT, _TOKENS = zip(_BODIES, _ANSWERS, strict=True)
_EMBEDDING = (embeddings.EmbeddingRequest, embeddings.EmbeddingList)
_POOLING = (embeddings.PoolingRequest, embeddings.PooledList)

GENERATION_ROUTES = (
    generation_route("/v1/chat/completions", "chat", "Answer a conversation", *_CHAT),
    generation_route("/v1/completions", "completion", "Continue one or several texts", *_TEXT),
    generation_route(
        "/inference/v1/generate", "generate", "Continue token ids; answers with token ids", *_TOKENS
    ),
    _pooling_route("/v1/embeddings", "embeddings", "Embed texts or token ids", *_EMBEDDING),
    replace(
        _pooling_route("/pooling", "pooling", "As /v1/embeddings, in vLLM's other form", *_POOLING),
        guarded=True,
    ),
    replace(
        generation_route(
            "/invocations",
            "invocations",
            "Whatever the body is: a conversation, a text, or token ids (SageMaker)",
            _BODIES,
            _ANSWERS,
        ),
        guarded=True,
    ),
)

TEXT_ROUTES = (
    text_route(
        "/tokenize",
        "tokenize",
        "Token ids of a text or a conversation",
        TokenizeRequest,
        answers.Tokenized,
    ),
    text_route(
        "/detokenize", "detokenize", "The text of token ids", DetokenizeRequest, answers.Detokenized
    ),
    _probe(
        "/tokenizer_info",
        "The tokenizer's vocabulary size, special tokens and chat template",
        answers.TokenizerInfo,
        switch="enable_tokenizer_info",
    ),
)

_SAGEMAKER = "As /health (SageMaker)"
PROBE_ROUTES = (
    _probe("/health", "200 while the engine makes progress", statuses=_COMMAND),
    _probe("/healthz", "As /health, with a body", answers.Status, statuses=_COMMAND),
    _probe("/health/ready", "200 while requests are served", name="ready", statuses=_COMMAND),
    _probe("/ping", _SAGEMAKER, statuses=_COMMAND),
    Route("POST", "/ping", "ping_post", _SAGEMAKER, statuses=_COMMAND),
    _probe("/version", "The version", answers.Version),
    _probe("/load", "Sequences inside", answers.Load),
    _probe("/metrics", "Prometheus metrics", str, media_type="text/plain"),
    _probe("/v1/models", "The served models", answers.ModelList, "models"),
    _probe(MODEL_PATH, "One served model", answers.ModelCard, "model", statuses=(404,)),
    _probe(
        "/kv_event_sources",
        "Where KV events are published, by rank",
        dict[str, answers.KvEventSource],
    ),
    _probe("/openapi.json", "This document", dict[str, Any], "openapi"),
    _probe("/docs", "Where to read on", str, media_type="text/plain"),
)

_ABORT = "/inference/v1/abort_requests"
CONTROL_ROUTES = (
    Route("POST", _ABORT, "abort", "Stop requests by id; unknown ids are ignored", AbortBody),
    Route(
        "POST", "/abort_requests", "abort_unversioned", f"As {_ABORT}", body=AbortBody, guarded=True
    ),
    _admin(
        "POST",
        "/reset_prefix_cache",
        "Forget all cached blocks",
        answers.Success,
        Query("reset_running_requests", bool, False, "Preempt what runs, so that it succeeds"),
    ),
    _admin(
        "POST",
        "/pause",
        "Stop scheduling",
        answers.Status,
        Query("mode", answers.PauseMode, "abort", _MODE),
        Query("clear_cache", bool, True, "Reset the prefix cache too (not with keep)"),
    ),
    _admin("POST", "/resume", "Schedule again", answers.Status),
    _admin("GET", "/is_paused", "Whether scheduling is stopped", answers.IsPaused),
    _admin(
        "POST",
        "/sleep",
        "Pause, and give memory back: 0 none, 1 the KV cache and the weights to the host, 2 both",
        answers.Sleeping,
        Query("level", answers.SleepLevel, 1, "0, 1 or 2"),
        Query("mode", answers.PauseMode, "abort", _MODE),
    ),
    _admin(
        "POST",
        "/wake_up",
        "Undo sleep, wholly or in part",
        answers.Awake,
        Query("tags", answers.WakeTag, None, "weights, kv_cache, or none: both", True),
    ),
    _admin("GET", "/is_sleeping", "Whether memory is given back", answers.IsSleeping),
    _admin(
        "GET",
        "/server_info",
        "The configuration, without keys",
        answers.ServerInfo,
        Query("config_format", answers.ConfigFormat, "text", "text or json"),
    ),
    replace(
        _admin(
            "GET",
            "/kv_events/dump",
            "Every block of the prefix cache, parents first",
            answers.CacheDump,
        ),
        statuses=_COMMAND,
    ),
)


ADAPTER_ROUTES = tuple(
    Route(
        "POST",
        f"/v1/{name}",
        name,
        summary,
        body=body,
        answer=str,
        media_type="text/plain",
        statuses=(404, 503),
        switch="enable_adapter_routes",
    )
    for name, summary, body in (
        ("load_lora_adapter", "Serve a LoRA adapter under a name", LoadAdapterBody),
        ("unload_lora_adapter", "Serve it no more", UnloadAdapterBody),
    )
)


def model_id(path: str) -> str | None:
    """Return the `{id}` of a path of one model, slashes included; None for any other path."""
    return path.removeprefix(_MODELS) or None if path.startswith(_MODELS) else None


GUARDED_PATHS = ("/v1", "/v2", "/inference")


def is_guarded(route: Route) -> bool:
    return route.guarded or route.path.startswith(GUARDED_PATHS)


ROUTES = (*GENERATION_ROUTES, *TEXT_ROUTES, *PROBE_ROUTES, *CONTROL_ROUTES, *ADAPTER_ROUTES)

_DIALECTS = "worker.api.dialects"


class Dialect(Protocol):
    """A module in `api/dialects`; `handlers` makes its handlers from `GenerationRoutes`."""

    ROUTES: tuple[Route, ...]
    handlers: Callable[[Any], dict[str, Handler]]


def dialects() -> tuple[Dialect, ...]:
    shelf = load_shelf(_DIALECTS)
    names: tuple[str, ...] = () if shelf is None else shelf.MODULES
    return tuple(cast(Dialect, load_shelf(f"{_DIALECTS}.{name}")) for name in names)


def all_routes() -> tuple[Route, ...]:
    return (*ROUTES, *(route for dialect in dialects() for route in dialect.ROUTES))


def query_values(exchange: Exchange, route: Route) -> dict[str, Any]:
    """Return every field's value. Raises 400 for an unknown, repeated or unreadable one."""
    given: dict[str, list[str]] = {}
    for name, value in exchange.query():
        given.setdefault(name, []).append(value)
    # A misspelled field would otherwise silently mean its default.
    known = {field.name for field in route.query}
    for name in given:
        if name not in known:
            raise RequestError(f"Unknown query field `{name[:100]}`", param=name[:100])
    return {field.name: _value(field, given.get(field.name)) for field in route.query}


def _value(field: Query, texts: list[str] | None) -> Any:
    if texts is None:
        return field.default
    if len(texts) > 1 and not field.many:
        raise RequestError(f"Query field `{field.name}` is given more than once", param=field.name)
    kind = list[field.kind] if field.many else field.kind  # type: ignore[name-defined]
    try:
        if kind is bool:
            return msgspec.json.decode(texts[0], type=bool)  # true or false, and nothing else
        return msgspec.convert(texts if field.many else texts[0], kind, strict=False)
    except msgspec.MsgspecError as error:
        raise RequestError(f"Query field `{field.name}`: {error}", param=field.name) from error
