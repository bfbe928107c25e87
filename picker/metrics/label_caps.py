"""Caps on the label values that clients can invent."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAMES = 1000
MAX_NAME_CHARACTERS = 256  # a body may name a model of megabytes
MAX_LABEL_SETS = 4096
OVERFLOW = "other"


class BoundedLabels:
    """Caps the number of distinct values a client can create of one kind of label."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._seen: set[str] = set()
        self._pinned: frozenset[str] = frozenset()

    def pin(self, values: Iterable[str]) -> None:
        """Admit these whatever the cap, beside those pinned before; they come from us."""
        self._pinned |= frozenset(values)

    def is_pinned(self, value: str) -> bool:
        """Whether it is one of ours."""
        return value in self._pinned

    def admit(self, value: str) -> str:
        """`value`, or `other` when it is new and the cap is reached, or is too long to be a name.

        "" is always allowed.
        """
        if not value or value in self._seen or value in self._pinned:
            return value
        if len(self._seen) >= self._limit or len(value) > MAX_NAME_CHARACTERS:
            return OVERFLOW
        self._seen.add(value)
        return value


class RequestLabels:
    """Values for `REQUEST_LABELS`, with what clients can invent capped.

    Each kind of value is capped, and so is the number of their combinations: a page of a thousand
    models times a thousand tenants would be of no use. Models that are pinned are reported
    in spite of both.
    """

    def __init__(self) -> None:
        self.models = BoundedLabels()
        self.fairness_ids = BoundedLabels()
        self._known: dict[tuple[str, str, str, int], tuple[str, str, str, str]] = {}
        self._sets: set[tuple[str, str, str, str]] = set()

    def pin_models(self, names: Iterable[str]) -> None:
        """Admit these whatever the caps; a name reported as `other` before is reported as
        itself.
        """
        self.models.pin(names)
        self._known.clear()

    def of(
        self, model: str, target_model: str, fairness_id: str = "", priority: int = 0
    ) -> tuple[str, str, str, str]:
        """The values of one request; the same ones whenever it is asked, but for later pins."""
        asked = (model, target_model, fairness_id, priority)
        known = self._known.get(asked)
        if known is not None:
            return known
        known = self._bounded(
            self.models.admit(model),
            self.models.admit(target_model),
            self.fairness_ids.admit(fairness_id),
            str(priority),
        )
        if max(len(model), len(target_model), len(fairness_id)) <= MAX_NAME_CHARACTERS:
            if len(self._known) >= MAX_LABEL_SETS:
                self._known.clear()  # a cache of what is worked out above
            self._known[asked] = known
        return known

    def _bounded(self, *values: str) -> tuple[str, str, str, str]:
        model, target, fairness, priority = values
        labels = (model, target, fairness, priority)
        if labels in self._sets:
            return labels
        if len(self._sets) >= MAX_LABEL_SETS:
            models = [one if self.models.is_pinned(one) else OVERFLOW for one in (model, target)]
            return (models[0], models[1], OVERFLOW, priority)
        self._sets.add(labels)
        return labels
