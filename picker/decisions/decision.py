"""One request as a value: what the client asked for, the choice of an endpoint, and the outcome.

The director creates one `Decision` when a request arrives and fills it in on the way; only the ring
changes it besides. Watchers get it when the request leaves and when it is over. Then it is
condensed: the heavy parts are dropped, and the ring stores the rest. The garbage collector does not
track it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from picker.decisions.steps import PluginSteps
from picker.decisions.views import FilterView, RefusalView
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.pool.policies import Rewritten
from picker.types import Candidate, Endpoint, FinishCause, InferenceRequest, SchedulingResult, Usage

MAX_NAME = 200  # characters of what clients name
MAX_MESSAGE = 500  # characters; clients may choose parts of it
NO_STAGES: Mapping[str, str] = {}  # msgspec encodes no read-only views


class ResponseTimes(msgspec.Struct, frozen=True):
    """The times and size of a response. `ttft_seconds` runs from the arrival of the request to the
    first non-empty piece of the body (None: there was none); `num_bytes` is the size of the body as
    the endpoint sent it. `processing_seconds` is the time that the picker added.
    """

    is_streaming: bool
    num_bytes: int = 0
    ttft_seconds: float | None = None
    processing_seconds: float = 0.0


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Endpoints, and their loads as packed bytes; see `packing.Load`."""

    endpoints: tuple[Endpoint, ...]
    loads: bytes


# The candidates of a profile: before its filters and after each of them; or, packed, the last list
# alone.
Seen: TypeAlias = tuple[Sequence[Candidate], ...] | PackedCandidates


class PackedProfile(msgspec.Struct, frozen=True, gc=False):
    """The result of a profile. `scorers` are names with weights, `scores` their packed scores of
    the stored candidates, perhaps fewer than `num_scored`. `num_tied` candidates share the best
    total (None: all are stored; count them). `picked` are keys of endpoints. `filters` name the
    removed endpoints only where the candidates are packed.
    """

    name: str
    picker: str
    picked: tuple[str, ...]
    num_candidates: int
    num_scored: int
    num_tied: int | None
    scorers: tuple[tuple[str, float], ...]
    scores: bytes
    filters: tuple[FilterView, ...]
    seen: Seen


# Untracked: ten thousand records would be long pauses of the garbage collector.
class Decision(msgspec.Struct, gc=False):
    """One request. All times are in seconds; those called `at` are on the clock of the requests.

    `number` is unique within the process, unlike the ids of clients. A request without a body has
    no `request` and no `result`: any endpoint will do.

    `queue_seconds` is the part of `decision_seconds` spent in flow control. `candidates` are those
    that the scheduler saw, `steps` the calls of plugins not yet counted, `attributes` the findings
    of producers. While a recording runs, all random draws of the last attempt come from `seed`.
    `is_prepared` is set when hooks are called, `destination` by the decision, `endpoint_key` when
    the request leaves. Only the ring sets `profiles`, `matched_prefix_tokens` and `stages`.
    """

    number: int
    received_at_seconds: float
    # The request
    request_id: str = ""
    incoming_model: str = ""
    target_model: str = ""
    fairness_id: str = ""
    objective: str = ""
    priority: int = 0
    size_bytes: int = 0
    request: InferenceRequest | None = None
    rewritten: Rewritten | None = None
    # The decision
    candidates: Sequence[Candidate] = ()
    attributes: Attributes | None = None
    steps: PluginSteps = msgspec.field(default_factory=PluginSteps)
    result: SchedulingResult | None = None
    seed: int | None = None
    is_prepared: bool = False
    destination: str = ""
    set_headers: Sequence[tuple[str, str]] = ()
    endpoint_key: str | None = None
    queue_seconds: float = 0.0
    decision_seconds: float = 0.0
    at_seconds: float = 0.0
    # The outcome
    cause: FinishCause | None = None  # None: it is not over
    ended_at_seconds: float = 0.0
    seconds: float = 0.0
    response_status: int | None = None
    served_by: str | None = None
    refusal: RefusedError | None = None
    usage: Usage | None = None
    response: ResponseTimes | None = None
    # Stored in the ring
    received_unix_seconds: float = 0.0
    is_alone: bool = False
    profiles: tuple[PackedProfile, ...] = ()
    primary_profile: str = ""
    matched_prefix_tokens: int | None = None
    stages: Mapping[str, str] = NO_STAGES
    refused: RefusalView | None = None

    def condense(self) -> None:
        """Drop everything that the ring does not show, and the refusal, which refers to frames."""
        self.request = self.attributes = self.result = None
        self.steps.clear()  # frames of an error that a step holds may refer to the steps
        self.candidates, self.set_headers = (), ()
        if self.refusal is not None:
            self.refused, self.refusal = _view(self.refusal), None
        names = (self.request_id, self.incoming_model, self.target_model)
        if sum(map(len, names)) + len(self.fairness_id) + len(self.objective) > MAX_NAME:
            self.request_id, self.incoming_model, self.target_model = map(short, names)
            self.fairness_id, self.objective = short(self.fairness_id), short(self.objective)


class FilteredOutError(RefusedError):
    def __init__(self, profile: str) -> None:
        super().__init__(
            Code.RESOURCE_EXHAUSTED,
            "the filters leave no endpoint for this request",
            DropReason.SATURATED,
            reference="no endpoints available for the given request",
        )
        self.profile = profile


class Watchers:
    """The observers of decisions; each has some of the methods named here.

    They must be quick and must not raise. `waits`: the request was parsed and may have to wait, for
    flow control or for a producer's look-up. `decided`: it leaves for its endpoint. `streamed`: a
    piece of its streaming response arrived; the argument is the seconds since the previous one.
    `finished`: it is over, for any reason. `plugin_failed`: a plugin raised an error other than a
    refusal, or timed out.
    """

    __slots__ = ("decided", "finished", "plugin_failed", "streamed", "waits")

    def __init__(self, *watchers: object) -> None:
        self.waits: tuple[Callable[[Decision], None], ...] = _all(watchers, "waits")
        self.decided: tuple[Callable[[Decision], None], ...] = _all(watchers, "decided")
        self.streamed: tuple[Callable[[Decision, float], None], ...] = _all(watchers, "streamed")
        self.finished: tuple[Callable[[Decision], None], ...] = _all(watchers, "finished")
        self.plugin_failed: tuple[Callable[[str], None], ...] = _all(watchers, "plugin_failed")


def short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _view(refusal: RefusedError) -> RefusalView:
    reason, message = refusal.drop_reason, refusal.message
    return RefusalView(
        refusal.status,
        refusal.code.value,
        message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…",
        None if reason is None else reason.value,
        refusal.retry_after_seconds,
    )


def _all(watchers: Sequence[object], event: str) -> tuple[Any, ...]:
    # Bound once: every request calls them several times.
    return tuple(getattr(one, event) for one in watchers if hasattr(one, event))
