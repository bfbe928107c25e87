"""One extractor on one endpoint: stores the values of pages, and decides when they are stale.

A failed page changes nothing until, after repeated failures, the values expire: the load is marked
stale, attributes are dropped. Changes of the problems of pages are logged at the first, second,
fourth, … time only, because a series may come and go with every page.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from picker.pool.datastore import Datastore
from picker.scrape.sources import ExtractError, Extraction, Extractor, NamesItsSeries, Scrape
from picker.types import Candidate, Endpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StalenessLimits:
    """Old values expire after these seconds or failures, whichever comes first."""

    seconds: float = 2.0
    failures: int = 4


@dataclass(slots=True, eq=False)
class EndpointReading:
    """Owns the state of one extractor (by its position in the source) for one endpoint."""

    endpoint: Endpoint
    position: int
    extractor_type: str
    extractor: Extractor
    datastore: Datastore
    limits: StalenessLimits
    note_error: Callable[[], None]
    rank: int | None = None
    _failures: int = 0
    _failing_since: float | None = None
    _stale: bool = False
    _problems: tuple[str, ...] = ()
    _changes: int = 0
    _gave_load: bool = False
    _given: frozenset[str] = frozenset()

    @property
    def series(self) -> Sequence[str] | None:
        extractor = self.extractor
        return extractor.series(self.endpoint) if isinstance(extractor, NamesItsSeries) else None

    def take(self, page: bytes, now_seconds: float, interval_seconds: float) -> None:
        """Process a page; the next one is expected after `interval_seconds`."""
        candidate = self._candidate()
        if candidate is None:
            return  # the endpoint left or moved during the scrape
        scrape = Scrape(
            page, candidate.endpoint, now_seconds, candidate.metrics, self.rank, interval_seconds
        )
        try:
            findings = self.extractor.extract(scrape)
        except ExtractError as error:
            self.note_error()
            self.fail(str(error), now_seconds)
        except Exception as error:
            # A bug in an extractor must not take the whole pool down.
            self.note_error()
            if not self._failures:
                log.exception("reading a page of %s", self.endpoint.key)
            self.fail(repr(error), now_seconds)
        else:
            self._store(findings)

    def fail(self, reason: str, now_seconds: float) -> None:
        """Note a failed scrape, or a page without usable values."""
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = now_seconds
        lost = (
            self._failures >= self.limits.failures
            or now_seconds - self._failing_since >= self.limits.seconds
        )
        if lost and not self._stale:
            self._stale = True
            self._give_up(reason)

    def end(self) -> None:
        """Stop reading an endpoint, which may stay in the pool; its values expire at once."""
        if self._candidate() is not None:
            self._forget()

    def _candidate(self) -> Candidate | None:
        candidate = self.datastore.get(self.endpoint.key)
        if candidate is None or not candidate.endpoint.is_same_server(self.endpoint):
            return None
        return candidate

    def _store(self, findings: Extraction) -> None:
        key = self.endpoint.key
        self.datastore.add_models(findings.models)
        if findings.metrics is not None:
            self._gave_load = True
            self.datastore.update_metrics(key, findings.metrics, findings.attributes)
        elif findings.attributes:
            self.datastore.set_attributes(key, findings.attributes)
        missing = self._given - findings.attributes.keys()
        if missing:
            self.datastore.drop_attributes(key, missing)
        self._given = frozenset(findings.attributes)
        if findings.problems:
            self.note_error()
        if findings.problems != self._problems:
            self._problems = findings.problems
            self._changes += 1
            if self._changes & (self._changes - 1) == 0:
                said = "; ".join(findings.problems) or "complete again"
                text = "%s of %s: %s (change %d)"
                log.warning(text, self.extractor_type, key, said, self._changes)
        if self._stale:
            log.info("endpoint %s answers scrapes again (%s)", key, self.extractor_type)
        self._failures, self._stale, self._failing_since = 0, False, None

    def _give_up(self, reason: str) -> None:
        candidate = self._candidate()
        if candidate is None:
            return
        self._forget()
        lost = "load" if self._gave_load or candidate.metrics is None else self.extractor_type
        log.warning(
            "endpoint %s: %s unknown after %d failed scrapes: %s",
            self.endpoint.key,
            lost,
            self._failures,
            reason,
        )

    def _forget(self) -> None:
        if self._gave_load:
            self.datastore.mark_stale(self.endpoint.key)
        if self._given:
            self.datastore.drop_attributes(self.endpoint.key, self._given)
