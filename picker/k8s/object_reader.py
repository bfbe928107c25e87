"""Objects of pools and policies as the picker reads them, and what is told of doubtful ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from picker.k8s.object_map import MalformedObjectError
from picker.k8s.objects.findings import ObjectFinding, Severity
from picker.k8s.objects.reading import read_policy, read_pool
from picker.k8s.objects.values import Pool
from picker.k8s.pods import PodError, PodRecord, is_ending, read_pod
from picker.pool.policy_objects import (
    POOL_GROUP,
    InferenceModelRewrite,
    InferenceObjective,
    PolicyObject,
    objective_of,
    rules_of,
)
from picker.pool.request_rules import Objective
from picker.pool.rewrites import RewriteRule

log = logging.getLogger(__name__)

MAX_TOLD: Final = 10_000  # states of objects that are remembered; then they are told again


class Counting(Protocol):
    """A counter."""

    def inc(self, amount: float = 1) -> None:
        """Count more."""
        ...


@dataclass(frozen=True, slots=True)
class PoolName:
    """A pool as other objects refer to it."""

    name: str
    namespace: str
    group: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
class ObjectReader:
    """Reads the objects that are about `pool`; owns what was told of them.

    What is doubtful is logged once for each state of an object. One that cannot be followed is a
    `MalformedObjectError` that says why, and counted in `errors`, once for each state too.
    """

    pool: PoolName
    errors: Counting
    _told: dict[tuple[str, str], str] = field(default_factory=dict)

    def read_pool(self, raw: msgspec.Raw) -> Pool | None:
        """The pool itself; None while it is being deleted, even if it is malformed."""
        document = msgspec.json.decode(raw)
        metadata = _metadata(document)
        is_ours = metadata.get("name") == self.pool.name and self._is_here(metadata)
        if not is_ours or metadata.get("deletionTimestamp") is not None:
            return None
        reading = read_pool(document)
        self._tell("InferencePool", metadata, reading.findings)
        return reading.value

    def read_pod(self, raw: msgspec.Raw) -> PodRecord | None:
        """A Pod; None when it is of another namespace.

        A malformed one that is being deleted has no last good state: it must not serve on.
        """
        try:
            record = read_pod(raw)
        except PodError as error:
            self.errors.inc()
            raise MalformedObjectError(str(error), keep_last_good=not is_ending(raw)) from error
        return record if record.namespace == self.pool.namespace else None

    def read_objective(self, raw: msgspec.Raw) -> Objective | None:
        """An objective; None when it is about another pool."""
        given = self._policy(raw)
        return objective_of(given) if isinstance(given, InferenceObjective) else None

    def read_rewrite(self, raw: msgspec.Raw) -> tuple[RewriteRule, ...] | None:
        """The rules of a rewrite; None when it is about another pool."""
        given = self._policy(raw)
        return rules_of(given) if isinstance(given, InferenceModelRewrite) else None

    def _policy(self, raw: msgspec.Raw) -> PolicyObject | None:
        document = msgspec.json.decode(raw)
        if not self._concerns(document) or not self._is_here(_metadata(document)):
            return None
        reading = read_policy(document)
        kind = document["kind"] if isinstance(document.get("kind"), str) else "object"
        self._tell(kind, _metadata(document), reading.findings)
        return reading.value

    def _is_here(self, metadata: dict[str, Any]) -> bool:
        """Whether an object is of the pool's namespace, as all are that a server was asked for."""
        return bool(metadata.get("namespace", self.pool.namespace) == self.pool.namespace)

    def _concerns(self, document: Any) -> bool:
        """Whether it may be about the pool; what is wrong with others is nobody's business here."""
        spec = document.get("spec") if isinstance(document, dict) else None
        reference = spec.get("poolRef") if isinstance(spec, dict) else None
        if not isinstance(reference, dict):
            return True
        named = (reference.get("name"), reference.get("group", POOL_GROUP))
        return named == (self.pool.name, self.pool.group)

    def _tell(self, kind: str, metadata: dict[str, Any], findings: Iterable[ObjectFinding]) -> None:
        """Raises `MalformedObjectError` when one of the findings is an error."""
        name, version = str(metadata.get("name")), str(metadata.get("resourceVersion"))
        is_new = self._told.get((kind, name)) != version
        if is_new:
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told[kind, name] = version
        errors = []
        for one in findings:
            if one.severity is Severity.ERROR:
                errors.append(str(one))
            elif is_new:
                log.warning("%s %s/%s: %s", kind, self.pool.namespace, name, one)
        if errors:
            if is_new:
                self.errors.inc()
            raise MalformedObjectError("; ".join(errors))


def _metadata(document: Any) -> dict[str, Any]:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return metadata if isinstance(metadata, dict) else {}
