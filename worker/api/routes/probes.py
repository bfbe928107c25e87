"""Probes of the worker (health, load, models, metrics), which never wait for the engine."""

import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from base.series import CONTENT_TYPE
from worker.api.generate.adapters import ServedAdapters, unknown_model
from worker.api.generate.admission import Admission
from worker.api.generate.engine import Engine
from worker.api.http.exchange import Exchange, status_error
from worker.api.schema import answers
from worker.api.schema.openapi import package_version
from worker.api.schema.routes import Handler, model_id
from worker.config import ApiConfig, KvEventsConfig
from worker.metrics.page import WorkerMetrics
from worker.types import EngineStats

_OK = msgspec.json.encode(answers.Status("ok"))
_METRICS_HEADERS = ((b"content-type", CONTENT_TYPE.encode()),)
_TEXT_HEADERS = ((b"content-type", b"text/plain; charset=utf-8"),)
_DOCS = b"""The interface of this server is described by /openapi.json (OpenAPI 3.1).
Any viewer of such documents shows it; this server ships none, as it would load scripts from afar.
"""


class ProbeRoutes:
    """Serves the probes; `created` in model cards is the time of its construction."""

    def __init__(
        self,
        config: ApiConfig,
        engine: Engine,
        stats: Callable[[], EngineStats],
        admission: Admission,
        metrics: WorkerMetrics,
        kv_events: KvEventsConfig,
        adapters: ServedAdapters,
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._admission = admission
        self._metrics = metrics
        self._version = msgspec.json.encode(answers.Version(package_version()))
        self._sources = msgspec.json.encode(_sources(kv_events))
        self._max_model_len = config.max_model_len
        created, root = int(time.time()), config.model_root
        self._cards = [
            self._card(name, root or name, created) for name in config.served_model_names
        ]
        self._adapters = adapters

    def handlers(self) -> dict[str, Handler]:
        return {
            "health": self._health,
            "healthz": self._healthz,
            "ready": self._ready,
            "ping": self._health,
            "ping_post": self._health,
            "version": lambda e: e.reply(self._version),
            "load": self._load,
            "metrics": self._page,
            "models": self._models,
            "model": self._model,
            "kv_event_sources": lambda e: e.reply(self._sources),
            "docs": lambda e: e.reply(_DOCS, HTTPStatus.OK, _TEXT_HEADERS),
        }

    async def _health(self, exchange: Exchange) -> None:
        """Answer 503 if the engine is gone or hangs: it has work, and a step is over budget."""
        await _reply(exchange, self._engine.is_alive and self._engine.is_progressing)

    async def _healthz(self, exchange: Exchange) -> None:
        if not (self._engine.is_alive and self._engine.is_progressing):
            raise status_error(HTTPStatus.SERVICE_UNAVAILABLE, "The engine makes no progress")
        await exchange.reply(_OK)

    async def _ready(self, exchange: Exchange) -> None:
        """Answer 503 also during a drain and while the engine sleeps: requests would wait."""
        reason = self._unready()
        if reason is not None:
            raise status_error(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        await _reply(exchange, True)

    def _unready(self) -> str | None:
        if not self._engine.is_alive:
            return "The engine is not running"
        if not self._engine.is_progressing:
            return "The engine makes no progress"
        if self._admission.draining:
            return "The server is shutting down"
        if self._engine.stats.sleep_level is not None:
            return "The engine is asleep; POST /wake_up wakes it"
        return None

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode(answers.ModelList("list", self._all_cards())))

    async def _model(self, exchange: Exchange) -> None:
        name, cards = model_id(exchange.path) or "", self._all_cards()
        for card in cards:
            if card.id == name:
                await exchange.reply(msgspec.json.encode(card))
                return
        raise unknown_model(name, [card.id for card in cards])

    def _all_cards(self) -> list[answers.ModelCard]:
        adapted = [
            self._card(served.adapter.name, served.adapter.path, served.created, served.parent)
            for served in self._adapters.all
        ]
        return [*self._cards, *adapted]

    def _card(
        self, name: str, root: str, created: int, parent: str | None = None
    ) -> answers.ModelCard:
        return answers.ModelCard(
            id=name,
            created=created,
            root=root,
            parent=parent,
            max_model_len=self._max_model_len,
            permission=[answers.ModelPermission(f"modelperm-{name}", "model_permission", created)],
        )

    async def _load(self, exchange: Exchange) -> None:
        await exchange.reply(msgspec.json.encode(answers.Load(self._admission.num_inside)))

    async def _page(self, exchange: Exchange) -> None:
        page = self._metrics.render(self._stats(), time.monotonic())
        await exchange.reply(page, HTTPStatus.OK, _METRICS_HEADERS)


async def _reply(exchange: Exchange, good: bool) -> None:
    await exchange.reply(b"", HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, ())


def _sources(config: KvEventsConfig) -> dict[str, answers.KvEventSource]:
    """Return the publishers by data-parallel rank (0 only), with no fields but vLLM's."""
    if not config.enable_kv_cache_events:
        return {}
    return {"0": msgspec.convert(config, answers.KvEventSource, from_attributes=True)}
