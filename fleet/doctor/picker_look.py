"""Facts about a picker, its workers and certificates."""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from fleet.doctor.paths import listed
from fleet.doctor.web import NO_JSON, NoPageError, PageClient, WebPage
from fleet.run.proc import Listener, listener_at
from fleet.several_pools import list_of, pools_of, which_to_name
from picker.admin.views import ConfigView, EndpointsView, EndpointView
from picker.flowcontrol.views import QueuesView
from picker.scrape.engines import PROCESS_START, EngineTable
from picker.scrape.exposition import PageSample, scan

_WORKER_SECONDS = 3.0
_MAX_WORKERS = 200  # more would show nothing new
_AT_ONCE = 32
_TLS_SECONDS = 5.0
_HERE = ("127.0.0.1", "::1", "localhost")
_OWN_NAMES = "engineConfigs"
_METRICS_KINDS = ("text/plain", "application/openmetrics-text")
_WANTS_TOKEN = "it requires a token (--metrics-endpoint-auth); look at one without that flag"
ENDPOINTS = "llm_d_epp_ready_endpoints"
SCRAPES_FAILED = "llm_d_epp_datalayer_poll_errors_total"
PAGES_LACKING = "llm_d_epp_datalayer_extract_errors_total"
PEERS_CONNECTED, PEERS_PUBLISHING = "pointsman_peers_connected", "pointsman_peers_heard"
_PEER_CALLS = "pointsman_peer_calls_total"
_SERIES = (ENDPOINTS, SCRAPES_FAILED, PAGES_LACKING, PEERS_CONNECTED, PEERS_PUBLISHING, _PEER_CALLS)
T = TypeVar("T")
Now = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class PickerFacts:
    """One picker. `problem` is the reason why nothing else is known.

    `readiness` is the text of `/readyz`; `ahead_seconds` is how far its clock is ahead of this one;
    `metrics` are the sums of the judged series, by name. `files` (open files and their limit) and
    `words` (its command line) are known only of a picker on this machine. `peer_calls` counts its
    calls to replicas by their result.
    """

    url: str
    problem: str | None = None
    is_ready: bool = True
    readiness: str = ""
    endpoints: tuple[EndpointView, ...] = ()
    queues: QueuesView = field(default_factory=QueuesView)
    config: ConfigView | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    ahead_seconds: float | None = None
    files: tuple[int, int] | None = None
    words: tuple[str, ...] = ()
    peer_calls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker, as it answers the doctor.

    `metrics_names` are the names of all its series, None if `/metrics` is not a metrics page;
    `metrics_kind` is the type of that page. `expected` are the names by which the picker reads its
    load. `models` is None if `/v1/models` is not a list of models.
    """

    address: str
    problem: str | None = None
    health_status: int = 200
    metrics_kind: str = ""
    metrics_names: frozenset[str] | None = frozenset()
    expected: tuple[str, ...] = ()
    models: tuple[str, ...] | None = ()
    version: str | None = None


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    address: str
    problem: str | None = None
    days_left: float | None = None


def utc_now() -> datetime:
    return datetime.now(UTC)


async def ask_picker(url: str, now: Now = utc_now) -> PickerFacts:
    site = PageClient(url)
    try:
        readiness = await site.page("/readyz")
        endpoints = await site.page("/endpoints")
        if endpoints.status == 404:
            await _refuse_several(site.url)
        if readiness.status not in (200, 503):
            raise NoPageError(f"/readyz answers {readiness.status}: that is no picker")
        pool = _decoded(endpoints, EndpointsView)
        listener = _listener(site.url)
        found = scan((await site.page("/metrics")).content, _SERIES)
        return PickerFacts(
            url=site.url,
            is_ready=readiness.status == 200,
            readiness=readiness.text,
            endpoints=pool.endpoints,
            queues=_decoded(await site.page("/queues"), QueuesView),
            config=_decoded(await site.page("/config"), ConfigView),
            metrics={name: sum(one.value for one in samples) for name, samples in found.items()},
            ahead_seconds=_ahead(readiness, now()),
            files=None if listener is None else listener.files,
            words=() if listener is None else listener.words,
            peer_calls=_by_result(found.get(_PEER_CALLS, ())),
        )
    except NoPageError as error:
        return PickerFacts(site.url, problem=str(error))


async def _refuse_several(url: str) -> None:
    """Raise `NoPageError` if `url` is that of a picker of several pools and names none of them."""
    try:
        page = await PageClient(list_of(url)).page("")
    except NoPageError:
        return
    problem = which_to_name(url, pools_of(url, page.content))
    if problem is not None:
        raise NoPageError(problem)


def _decoded(page: WebPage, kind: type[T]) -> T:
    if page.status in (401, 403):
        raise NoPageError(f"it answers {page.status}: {_WANTS_TOKEN}")
    if page.status != 200:
        raise NoPageError(f"it answers {page.status}: {page.text[:200]}")
    try:
        return msgspec.json.decode(page.content, type=kind)
    except NO_JSON as error:
        raise NoPageError("what answers there is not this picker") from error


def _by_result(samples: Iterable[PageSample]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in samples:
        result = one.labels.get("result", "")
        found[result] = found.get(result, 0.0) + one.value
    return found


def _listener(url: str) -> Listener | None:
    split = urlsplit(url)
    is_here = split.hostname in _HERE and split.port is not None
    return listener_at(split.port) if is_here and split.port else None


def _ahead(page: WebPage, now: datetime) -> float | None:
    try:
        given = parsedate_to_datetime(page.date or "")
    except ValueError:
        return None
    return None if given.tzinfo is None else (given - now).total_seconds()


async def ask_workers(picker: PickerFacts) -> tuple[WorkerFacts, ...]:
    # The picker then reads other names than those of the engines.
    own_names = picker.config is not None and _OWN_NAMES in picker.config.written
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(one: EndpointView) -> WorkerFacts:
        async with gate:
            return await ask_worker(one.address, () if own_names else expected_names(one.labels))

    asked = (ask(one) for one in picker.endpoints[:_MAX_WORKERS])
    return tuple(await asyncio.gather(*asked))


def expected_names(labels: Mapping[str, str]) -> tuple[str, ...]:
    series = EngineTable().of(labels)
    return tuple(name for name in series.names if name != PROCESS_START)


async def ask_worker(address: str, expected: Sequence[str] = ()) -> WorkerFacts:
    site = PageClient(address, _WORKER_SECONDS)
    try:
        health = await site.page("/health")
        metrics = await site.page("/metrics")
        models = await site.page("/v1/models")
        version = await site.page("/version")
    except NoPageError as error:
        return WorkerFacts(address, problem=str(error))
    return WorkerFacts(
        address,
        health_status=health.status,
        metrics_kind=metrics.kind if metrics.status == 200 else f"a {metrics.status}",
        metrics_names=_names(metrics),
        expected=tuple(expected),
        models=_models(models),
        version=found if isinstance(found := _json(version).get("version"), str) else None,
    )


def _names(page: WebPage) -> frozenset[str] | None:
    if page.status != 200 or (page.kind and page.kind not in _METRICS_KINDS):
        return None
    lines = page.text.splitlines()
    return frozenset(
        line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")
    )


def _models(page: WebPage) -> tuple[str, ...] | None:
    found = _json(page)
    if not isinstance(found.get("data"), list):
        return None
    return tuple(str(one.get("id")) for one in listed(found, "data"))


def _json(page: WebPage) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(page.content) if page.status == 200 else None
    except NO_JSON:
        return {}
    return found if isinstance(found, dict) else {}


async def ask_certificate(address: str, now: Now = utc_now) -> CertificateFacts:
    # Most runs look at no certificate, and this import takes as long as all others here.
    from cryptography import x509  # noqa: PLC0415

    try:
        split = urlsplit(address if "://" in address else f"//{address}")
        host, port = split.hostname or "", split.port or 443
        async with asyncio.timeout(_TLS_SECONDS):
            pem = await asyncio.to_thread(
                ssl.get_server_certificate, (host, port), timeout=_TLS_SECONDS
            )
        until = x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc
    except (OSError, ValueError) as error:
        return CertificateFacts(
            address, problem=f"no TLS there ({str(error) or type(error).__name__})"
        )
    return CertificateFacts(address, days_left=(until - now()).total_seconds() / 86_400)
