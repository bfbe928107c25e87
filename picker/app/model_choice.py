"""The choice of a pool by the model that a request names, in its body or in its path.

A pool has the models that its rewrites match exactly, those that its endpoints list at
`/v1/models`, and the adapters that run there. Rewrites take precedence, then the order of the
pools. The list of an endpoint is remembered until an endpoint lists others: a pool without
endpoints still has its models, and refuses requests for them as such. The reply names the pool in a
request header, by which the proxy, whose route the picker clears, chooses the pool's cluster, and
the model in two more, as the body-based router of the Gateway API Inference Extension does.

With `--model-header-only` the reply has only these two: it chooses nothing and refuses nothing, for
a gateway whose routes match them and lead to pools with pickers, or ports, of their own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import msgspec
from msgspec.structs import replace

from base.series import Counter
from picker.errors import JSON_CONTENT, Code, ErrorForm, RefusedError, no_endpoints
from picker.extproc.server import Evict, ExchangeSource, RequestExchange
from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.plugins.parsers._form_bodies import form_field
from picker.plugins.parsers._json_bodies import decoded, media_type_of, model_of, unreadable
from picker.pool.datastore import Snapshot
from picker.pool.policies import RuleSet
from picker.requestcontrol.headers import target_of
from picker.types import FinishCause, RawRequest, RouteDecision

log = logging.getLogger(__name__)

POOL_HEADER: Final = "x-pointsman-pool"
MODEL_HEADER: Final = "x-gateway-model-name"
BASE_MODEL_HEADER: Final = "x-gateway-base-model-name"
LIST_PATH: Final = "/v1/models"
MODEL: Final = "model"
FORM: Final = "multipart/form-data"
# The maximum age of the known models, and the interval of searches for a missing one.
MAX_AGE_SECONDS: Final = 0.25
MIN_AGE_SECONDS: Final = 0.05
_MAX_WARNINGS: Final = 100
_SHOWN_MODELS: Final = 50
_SHOWN_LENGTH: Final = 200


class _Named(msgspec.Struct):
    model: Any = None


_decode_named = msgspec.json.Decoder(_Named).decode


@dataclass(frozen=True, slots=True)
class PoolOfModels:
    key: str
    director: ExchangeSource
    snapshot: Callable[[], Snapshot]
    rules: Callable[[], RuleSet]


class KnownModels:
    """Owns the map from models to pools, which is renewed on demand."""

    def __init__(self, pools: Sequence[PoolOfModels], clock: Callable[[], float]) -> None:
        self._pools, self._clock = tuple(pools), clock
        self._listed: dict[str, dict[str, ServedModel]] = {}  # by key of the pool
        self._found: dict[str, PoolOfModels] = {}
        self._looked_at: float | None = None
        self._warned: set[str] = set()

    def pool_of(self, model: str) -> PoolOfModels | None:
        found = self._found.get(model)
        # A missing model is searched sooner, as it may have been loaded just now; but a flood of
        # unknown names must not search for each request.
        self._look(MAX_AGE_SECONDS if found is not None else MIN_AGE_SECONDS)
        return self._found.get(model)

    def headers_of(self, model: str) -> tuple[tuple[str, str], ...]:
        """Return the headers that name a model and, if a pool has it, the one it is based on."""
        if not model.isprintable():
            return ()
        pool = self.pool_of(model)
        if pool is None:
            return ((MODEL_HEADER, model),)
        base = self._listed.get(pool.key, {}).get(model, ServedModel(model)).parent or model
        return ((MODEL_HEADER, model), (BASE_MODEL_HEADER, base))

    @property
    def names(self) -> tuple[str, ...]:
        self._look(MAX_AGE_SECONDS)
        return tuple(sorted(self._found))

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Return the pools without an endpoint that has listed its models."""
        return tuple(one.key for one in self._pools if one.key not in self._listed)

    def listing(self) -> list[dict[str, Any]]:
        entries = []
        for name in self.names:
            pool = self._found[name]
            listed = self._listed.get(pool.key, {}).get(name, ServedModel(name))
            entry = {"id": name, "object": "model", "created": listed.created}
            entry |= {"owned_by": listed.owned_by or pool.key}
            entries.append(entry | ({"parent": listed.parent} if listed.parent else {}))
        return entries

    def _look(self, age_seconds: float) -> None:
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < age_seconds:
            return
        self._looked_at = now
        found: dict[str, PoolOfModels] = {}
        # In the order of precedence: the first pool that has a name gets it.
        for names_of in (_rewritten, self._list_of, _running):
            for pool in self._pools:
                for name in names_of(pool):
                    other = found.setdefault(name, pool)
                    if other is not pool:
                        self._warn(name, other.key, pool.key)
        self._found = found

    def _list_of(self, pool: PoolOfModels) -> Iterable[str]:
        listed: dict[str, ServedModel] = {}
        for candidate in pool.snapshot().candidates:
            for one in candidate.attributes.get(MODELS_ATTRIBUTE, ()):
                listed.setdefault(one.id, one)
        # Not replaced by an empty list: endpoints that restart list nothing for a while.
        if listed:
            self._listed[pool.key] = listed
        # Without endpoints, those of its last list: clients retry a 503, and a 404 is final.
        return self._listed.get(pool.key, ())

    def _warn(self, model: str, first: str, second: str) -> None:
        if model not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(model)
            log.warning(
                "the pools %s and %s both have the model %s: requests for it go to %s",
                *(first, second, shown(model), first),
            )


def _rewritten(pool: PoolOfModels) -> Iterable[str]:
    return sorted({model for rule in pool.rules().rewrites for model in rule.models})


def _running(pool: PoolOfModels) -> Iterable[str]:
    known = [one.metrics for one in pool.snapshot().candidates if one.metrics is not None]
    return {name for one in known for name in (*one.active_models, *one.waiting_models) if name}


class ModelChoice:
    """An `ExchangeSource` that chooses the director of a request when its body is complete, or with
    `names_only` names the model and chooses none.
    """

    def __init__(self, models: KnownModels, unknown: Counter, names_only: bool = False) -> None:
        self.models, self._unknown, self._names_only = models, unknown, names_only

    def begin(self, evict: Evict, /) -> ChosenLater | NamedOnly:
        return NamedOnly(self) if self._names_only else ChosenLater(self, evict)

    def choose(self, raw: RawRequest) -> PoolOfModels:
        """Choose the pool of a complete request. Raises `RefusedError` if no pool has its model."""
        return self.pool_with(self.named(raw))

    def named(self, raw: RawRequest) -> str:
        """Return the model that a complete request names. Raises `RefusedError` if it has none."""
        return self._of_path(raw) if raw.body is None else self._of_body(raw.headers, raw.body)

    def pool_with(self, model: str) -> PoolOfModels:
        """Return the pool that has the model. Raises `RefusedError` if none has."""
        pool = self.models.pool_of(model)
        if pool is not None:
            return pool
        self._unknown.inc()
        # A 404 would be final for the client, and the model may belong to that pool.
        if unlisted := self.models.unlisted:
            text = f"no endpoint of {', '.join(unlisted)} has listed its models yet"
            raise no_endpoints(f"the model '{shown(model)}' is unknown, but {text}")
        raise self._refusal(Code.NOT_FOUND, f"the model '{shown(model)}' does not exist")

    def _of_path(self, raw: RawRequest) -> str:
        """Return the model of a request without a body: `/v1/models/NAME` or `?model=NAME`."""
        path, _, query = target_of(raw.headers).partition("?")
        if path.rstrip("/") == LIST_PATH:
            raise ModelListing(self.models.listing())
        if path.startswith(f"{LIST_PATH}/"):
            return unquote(path.removeprefix(f"{LIST_PATH}/"))
        if named := parse_qs(query).get(MODEL):
            return named[-1]
        text = "the request has no body, and its path names no model"
        raise self._refusal(Code.NOT_FOUND, text)

    def _of_body(self, headers: Mapping[str, str], body: bytes) -> str:
        if media_type_of(headers) == FORM:
            text = f"the form has no field '{MODEL}'"
            model = form_field(body, headers["content-type"], MODEL)
        else:
            text = f"the request body has no '{MODEL}'"
            try:
                model = model_of({MODEL: decoded(body, _decode_named)[0].model})
            except RefusedError as refusal:
                raise unreadable(headers, body, refusal) from refusal
        if not model:
            raise self._refusal(Code.BAD_REQUEST, text)
        return model

    def _refusal(self, code: Code, text: str) -> RefusedError:
        names = [shown(name) for name in self.models.names]
        if len(names) > _SHOWN_MODELS:
            names[_SHOWN_MODELS:] = [f"and {len(names) - _SHOWN_MODELS} more"]
        listed = f"{text}; known are: {', '.join(names) or 'none yet'}"
        return RefusedError(code, listed, param=MODEL)


class ChosenLater:
    __slots__ = ("_choice", "_evict", "_exchange", "_model", "_pool", "_refusal")

    def __init__(self, choice: ModelChoice, evict: Evict) -> None:
        self._choice, self._evict = choice, evict
        self._exchange: RequestExchange | None = None
        self._pool = self._model = ""
        self._refusal: RefusedError | None = None

    def decides_at_once(self, raw: RawRequest) -> bool:
        try:
            self._model = self._choice.named(raw)
            pool = self._choice.pool_with(self._model)
        except RefusedError as refusal:
            self._refusal = refusal
            return True
        self._pool, self._exchange = pool.key, pool.director.begin(self._evict)
        return self._exchange.decides_at_once(raw)

    async def route(self, raw: RawRequest) -> RouteDecision:
        if self._exchange is None:
            raise self._refusal or RefusedError(Code.INTERNAL, "no pool was chosen")
        decision = await self._exchange.route(raw)
        # Envoy finds the cluster of the pool by it, which has retries and health checks.
        named = ((POOL_HEADER, self._pool), *self._choice.models.headers_of(self._model))
        return replace(decision, set_headers=(*decision.set_headers, *named))

    def finish(
        self, cause: FinishCause, response_status: int | None = None, served_by: str | None = None
    ) -> None:
        if self._exchange is not None:
            self._exchange.finish(cause, response_status, served_by)


class NamedOnly:
    """The exchange of a request whose pool the gateway's routes choose."""

    __slots__ = ("_choice",)

    def __init__(self, choice: ModelChoice) -> None:
        self._choice = choice

    def decides_at_once(self, raw: RawRequest) -> bool:
        return True

    async def route(self, raw: RawRequest) -> RouteDecision:
        try:
            headers = self._choice.models.headers_of(self._choice.named(raw))
        except RefusedError:
            headers = ()  # the pool's own picker refuses it
        return RouteDecision("", headers, skip_response=True)

    def finish(
        self, cause: FinishCause, response_status: int | None = None, served_by: str | None = None
    ) -> None:
        pass


class ModelListing(RefusedError):  # noqa: N818
    """The response to `GET /v1/models`, raised like a refusal since no endpoint serves it."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(Code.NOT_FOUND, json.dumps({"object": "list", "data": entries}))

    @property
    def status(self) -> int:
        return 200

    def answer(self, form: ErrorForm) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.message, (JSON_CONTENT,)


def shown(text: str) -> str:
    """Return a name that a client chose, made fit for one line of a message."""
    cut = text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"
    return "".join(letter if letter.isprintable() else " " for letter in cut)
