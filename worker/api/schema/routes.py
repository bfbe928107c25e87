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


def _admin(
    method: str, path: str, summary: str, answer: Any, *query: Query, runs_command: bool = True
) -> Route:
    return Route(
        method,
        path,
        path[1:].replace("/", "_"),
        summary,
        answer=answer,
        query=query,
        statuses=_COMMAND if runs_command else (),
        switch="enable_admin_routes",
        guarded=True,
    )


GENERATION_ROUTES = (
    generation_route(
        "/v1/chat/completions", "chat", "Answer a conversation", ChatRequest, answers.ChatCompletion
    ),
    generation_route(
        "/v1/completions",
        "completion",
        "Continue one or several texts",
        CompletionRequest,
        answers.TextCompletion,
    ),
    generation_route(
        "/inference/v1/generate",
        "generate",
        "Continue token ids; answers with token ids",
        GenerateRequest,
        answers.Generated,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        "embeddings",
        "Embed texts or token ids",
        embeddings.EmbeddingRequest,
        embeddings.EmbeddingList,
        statuses=(404, 503),
    ),
    Route(
        "POST",
        "/pooling",
        "pooling",
        "As /v1/embeddings, in vLLM's other form",
        embeddings.PoolingRequest,
        embeddings.PooledList,
        statuses=(404, 503),
        guarded=True,
    ),
    replace(
        generation_route(
            "/invocations",
            "invocations",
            "Whatever the body is: a conversation, a text, or token ids (SageMaker)",
            (ChatRequest, CompletionRequest, GenerateRequest),
            (answers.ChatCompletion, answers.TextCompletion, answers.Generated),
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
    Route(
        "GET",
        "/tokenizer_info",
        "tokenizer_info",
        "The tokenizer's vocabulary size, special tokens and chat template",
        answer=answers.TokenizerInfo,
        switch="enable_tokenizer_info",
    ),
)

PROBE_ROUTES = (
    Route("GET", "/health", "health", "200 while the engine makes progress", statuses=_COMMAND),
    Route(
        "GET",
        "/healthz",
        "healthz",
        "As /health, with a body",
        answer=answers.Status,
        statuses=_COMMAND,
    ),
    Route("GET", "/health/ready", "ready", "200 while requests are served", statuses=_COMMAND),
    Route("GET", "/ping", "ping", "As /health (SageMaker)", statuses=_COMMAND),
    Route("POST", "/ping", "ping_post", "As /health (SageMaker)", statuses=_COMMAND),
    Route("GET", "/version", "version", "The version", answer=answers.Version),
    Route("GET", "/load", "load", "Sequences inside", answer=answers.Load),
    Route("GET", "/metrics", "metrics", "Prometheus metrics", answer=str, media_type="text/plain"),
    Route("GET", "/v1/models", "models", "The served models", answer=answers.ModelList),
    Route(
        "GET", MODEL_PATH, "model", "One served model", answer=answers.ModelCard, statuses=(404,)
    ),
    Route(
        "GET",
        "/kv_event_sources",
        "kv_event_sources",
        "Where KV events are published, by rank",
        answer=dict[str, answers.KvEventSource],
    ),
    Route("GET", "/openapi.json", "openapi", "This document", answer=dict[str, Any]),
    Route("GET", "/docs", "docs", "Where to read on", answer=str, media_type="text/plain"),
)

CONTROL_ROUTES = (
    Route(
        "POST",
        "/inference/v1/abort_requests",
        "abort",
        "Stop requests by id; unknown ids are ignored",
        body=AbortBody,
    ),
    Route(
        "POST",
        "/abort_requests",
        "abort_unversioned",
        "As /inference/v1/abort_requests",
        body=AbortBody,
        guarded=True,
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
    _admin(
        "GET", "/is_paused", "Whether scheduling is stopped", answers.IsPaused, runs_command=False
    ),
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
    _admin(
        "GET",
        "/is_sleeping",
        "Whether memory is given back",
        answers.IsSleeping,
        runs_command=False,
    ),
    _admin(
        "GET",
        "/server_info",
        "The configuration, without keys",
        answers.ServerInfo,
        Query("config_format", answers.ConfigFormat, "text", "text or json"),
        runs_command=False,
    ),
    _admin(
        "GET",
        "/kv_events/dump",
        "Every block of the prefix cache, parents first",
        answers.CacheDump,
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
