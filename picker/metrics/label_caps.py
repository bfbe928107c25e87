"""Bounds on the label values that clients choose, and on their share of the metrics page.

The series of one request's labels take about 60 KB of the page, so limiting names alone would allow
a page of many megabytes. A model that the pool knows has a label of its own; all others are
`other`. The lines of tenants, of pairs of model and target that no rule makes, and of models known
only from an answer are charged to a budget of bytes, which all pools share; when it is used up,
they are `other` too. A label that was charged stays, so a gauge goes down where it went up.
"""

from collections.abc import Iterable
from typing import NamedTuple

MAX_NAMES = 1000  # clients choose models and tenants
MAX_NAME_CHARACTERS = 256  # a body may name a model of megabytes
MAX_LABEL_SETS = 4096
MAX_ROOM_BYTES = 900 * 1024  # with the other series of a usual pool the page stays below 2 MB
OVERFLOW = "other"
# The tenant of a request that names none, which the client cannot choose.
DEFAULT_FLOW = "default-flow"
_SHARED = frozenset({"", OVERFLOW, DEFAULT_FLOW})
RequestLabelValues = tuple[str, str, str, str]


class Lines(NamedTuple):
    """Lines of the page; each has `each_bytes` besides the values of its labels."""

    number: int
    each_bytes: int

    def cost(self, values: Iterable[str]) -> int:
        return self.number * (self.each_bytes + sum(map(_length, values)))


# At most: of one set of request labels, of the deprecated names of a model and its target, of one
# way in which time in the queue ends, and of a model at an endpoint.
SET, TWINS, ENDING, ATTEMPT = Lines(265, 135), Lines(175, 115), Lines(66, 175), Lines(2, 250)


class PageRoom:
    """Owns the bytes of the page that clients may use up: a share for models that are known only
    from an answer, the rest for tenants and combinations.
    """

    def __init__(self, max_bytes: int = MAX_ROOM_BYTES) -> None:
        self._for_models = max_bytes // 3
        self._for_others = max_bytes - self._for_models

    def take(self, num_bytes: int, is_model: bool = False) -> bool:
        left = self._for_models if is_model else self._for_others
        if num_bytes > left:
            return False
        if is_model:
            self._for_models -= num_bytes
        else:
            self._for_others -= num_bytes
        return True


def _length(value: str) -> int:
    return len(value.encode(errors="replace")) + sum(map(value.count, '\\"\n'))


class BoundedLabels:
    """Caps the number of distinct values of one kind of label."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def admit(self, value: str) -> str:
        """Return `value`, or `other` if it is new and the cap is reached, or if it is too long."""
        if not value or value in self._seen:
            return value
        if len(self._seen) >= self._limit or len(value) > MAX_NAME_CHARACTERS:
            return OVERFLOW
        self._seen.add(value)
        return value


class RequestLabels:
    """The values of `REQUEST_LABELS`. Owns the known names, and the labels that were charged. If a
    rule or a worker names a model, under its own name or as the target of a rewrite, its labels
    cost nothing without a tenant: what an operator configures is always reported.
    """

    def __init__(self, room: PageRoom | None = None) -> None:
        self._room = PageRoom() if room is None else room
        self._named: set[str] = {"", OVERFLOW}
        self._served, self._answered = BoundedLabels(), BoundedLabels()
        self._models: set[str] = {""}  # those that are named, and those that were answered
        self._rewritten: set[tuple[str, str]] = set()
        self._tenants: set[str] = set(_SHARED)
        self._paid: set[tuple[RequestLabelValues, str]] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._seen_at: set[tuple[str, str]] = set()  # models and endpoints
        self._known: dict[tuple[str, str, str, int], RequestLabelValues] = {}

    def pin_rewrites(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Report these models and targets, and each pair, under their own names from now on."""
        new = set(pairs) - self._rewritten
        if new:
            self._rewritten |= new
            self._name(name for pair in new for name in pair)

    def add_served(self, names: Iterable[str]) -> None:
        """Use their own names to report up to a thousand models that workers serve."""
        self._name(name for name in names if self._served.admit(name) == name)

    def answered(self, model: str) -> None:
        if model not in self._models and self._answered.admit(model) == model:
            self._models.add(model)
            self._known.clear()

    def model(self, name: str, endpoint: str = "") -> str:
        if name in self._named or (name, endpoint) in self._seen_at:
            return name
        # Only one that has a set of its own can have a label here.
        if (name, name) not in self._pairs or not self._room.take(ATTEMPT.cost((name, endpoint))):
            return OVERFLOW
        self._seen_at.add((name, endpoint))
        return name

    def tenant(self, fairness_id: str) -> str:
        return fairness_id if fairness_id in self._tenants else OVERFLOW

    def of(
        self, model: str, target_model: str, fairness_id: str = "", priority: int = 0
    ) -> RequestLabelValues:
        """Return the label values of one request; they change only when a model becomes known."""
        asked = (model, target_model, fairness_id, priority)
        known = self._known.get(asked)
        if known is not None:
            return known
        is_short = max(len(model), len(target_model), len(fairness_id)) <= MAX_NAME_CHARACTERS
        tenant = fairness_id if len(fairness_id) <= MAX_NAME_CHARACTERS else OVERFLOW
        name = model if model in self._models else OVERFLOW
        target = target_model if target_model in self._models else OVERFLOW
        found = self._paid_for((name, target, tenant, str(priority)), SET)
        self._tenants.add(found[2])
        if is_short:
            if len(self._known) >= MAX_LABEL_SETS:
                self._known.clear()  # a cache of what is worked out above
            self._known[asked] = found
        return found

    def ending(self, labels: RequestLabelValues, outcome: str) -> RequestLabelValues:
        return self._paid_for(labels, ENDING, outcome)

    def _paid_for(
        self, labels: RequestLabelValues, lines: Lines, outcome: str = ""
    ) -> RequestLabelValues:
        model, target, tenant, priority = labels
        is_shared, pair = tenant in _SHARED, (model, target)
        is_plain = model == target and target in self._named
        is_ours = is_plain or pair in self._rewritten
        # A rewrite of every model is ours too, but takes no room for all the ends in the queue.
        is_rewritten = lines is SET and model == OVERFLOW and target in self._named
        if (is_shared and (is_ours or is_rewritten)) or (labels, outcome) in self._paid:
            return labels
        cost = lines.cost(labels)
        if not is_ours and pair not in self._pairs:
            cost += TWINS.cost(pair)
        if self._room.take(cost, is_model=is_shared and model == target):
            self._paid.add((labels, outcome))
            self._pairs.add(pair)
            return labels
        if not is_shared:
            closest = model, target, OVERFLOW, priority
        elif model != OVERFLOW and target in self._named:
            closest = OVERFLOW, target, tenant, priority
        else:
            closest = OVERFLOW, OVERFLOW, OVERFLOW, priority
        return self._paid_for(closest, lines, outcome)

    def _name(self, names: Iterable[str]) -> None:
        new = {name for name in names if len(name) <= MAX_NAME_CHARACTERS} - self._named
        if new:
            self._named |= new
            self._models |= new
            self._known.clear()
