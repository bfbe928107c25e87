"""The source of each finding in a replay: the recording, or the producer.

A recorded finding is used if the entry of its producer, and those of all producers whose findings
that one reads, are the same in the replayed configuration. Otherwise the producer runs, if the
recording contains all its inputs; if not, a note says so and the recorded findings apply. Producers
whose recorded findings are used run as well if they can: they remember what they looked up, and
learn from it when the request leaves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from picker.config.build import Assembly
from picker.config.data_keys import needed_by, optional_for, produced_by
from picker.config.instances import Instance
from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import LATENCY_PREDICTIONS, Attributes, DataKey
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    KvEventConsumer,
    RequestProcessor,
    Screener,
)
from picker.plugins.producers.identities import SessionIdProducerParameters
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.recording.values import OWN_NOTES
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import Candidate, Endpoint, InferenceRequest

Describe = Callable[[Endpoint], Mapping[str, Any]]
_APPLIES = "the recorded data applies"
_BEFORE_SCHEDULING = (Admitter, RequestProcessor, Screener)


@dataclass(frozen=True, slots=True)
class FindingSources:
    notes: tuple[str, ...]
    _recorded_producers: frozenset[str]
    _recorded_keys: frozenset[str]
    _beside: tuple[BoundPlugin[DataProducer], ...]
    _run: tuple[BoundPlugin[DataProducer], ...]
    _describers: tuple[Describe, ...]
    _log: PluginLog
    _described: dict[str, tuple[Candidate, Candidate]] = field(default_factory=dict)

    def candidates(self, candidates: tuple[Candidate, ...]) -> Sequence[Candidate]:
        """Return the candidates with the attributes that the replayed configuration describes."""
        if not self._describers:
            return candidates
        return [self._with_attributes(one) for one in candidates]

    def fill(
        self, recorded: Attributes, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> tuple[Attributes, InferenceRequest]:
        """Return the findings for the scheduler, and the request as changed by producers."""
        attributes = Attributes()
        for key, value in recorded.items():
            if key.producer in self._recorded_producers or str(key) in self._recorded_keys:
                attributes[key] = value
        for producer in self._beside:
            self._note(producer, request, candidates, attributes)
        for producer in self._run:
            log = self._log
            try:
                seen = producer.scoped(attributes)
                request = producer.plugin.produce(request, candidates, seen)
            except Exception as error:
                log.exception(producer.name, error, "scheduling continues with the other findings")
                break
        return attributes, request

    def _note(
        self,
        producer: BoundPlugin[DataProducer],
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
    ) -> None:
        """Run `producer` so that it remembers what it looks up; discard its findings."""
        # A copy: its other findings must not replace the recorded ones.
        beside, log = Attributes(), self._log
        for key, value in attributes.items():
            beside[key] = value
        try:
            producer.plugin.produce(request, candidates, producer.scoped(beside))
        except Exception as error:
            log.exception(producer.name, error, "its state may differ from the original")
        for key, value in beside.items():
            if key.data_type in OWN_NOTES:
                attributes[key] = value

    def _with_attributes(self, candidate: Candidate) -> Candidate:
        known = self._described.get(candidate.key)
        # Cached by identity, as candidates rarely change between two decisions.
        if known is None or known[0] is not candidate:
            attributes = dict(candidate.attributes)
            for describe in self._describers:
                attributes.update(describe(candidate.endpoint))
            known = candidate, replace(candidate, attributes=attributes)
            self._described[candidate.key] = known
        return known[1]


def finding_sources(
    recorded: Assembly, used: Assembly, *, has_prompts: bool, log: PluginLog
) -> FindingSources:
    """Plan how `used` gets the findings of decisions that `recorded` made."""
    plan = _Plan(recorded, used, has_prompts)
    unchanged: list[Instance] = []
    run: list[BoundPlugin[Any]] = []
    beside: list[BoundPlugin[Any]] = []
    for producer in used.pipeline.producers:
        instance = used.instances[producer.name]
        reason = plan.obstacle(instance)
        if plan.is_unchanged(instance):
            unchanged.append(instance)
            if reason is None and isinstance(producer.plugin, DataProducer):
                beside.append(producer)
        elif reason is None and isinstance(producer.plugin, DataProducer):
            run.append(producer)
            plan.note(instance, "has changed since the recording: it runs")
        else:
            unchanged.append(instance)
            plan.note(instance, f"has changed since the recording, but {reason}: {_APPLIES}")
    others = {
        one.name
        for one in used.instances.values()
        if plan.is_unchanged(one) and not isinstance(one.plugin, DataProducer | AsyncDataProducer)
    }
    return FindingSources(
        notes=(*plan.notes, *_beyond_findings(plan, used)),
        _recorded_producers=frozenset({one.name for one in unchanged} | others),
        _recorded_keys=frozenset(str(key) for one in unchanged for key in produced_by(one)),
        _beside=tuple(beside),
        _run=tuple(run),
        _describers=tuple(
            one.plugin.describe
            for one in used.instances.values()
            if not plan.is_unchanged(one) and hasattr(one.plugin, "describe")
        ),
        _log=log,
    )


class _Plan:
    def __init__(self, recorded: Assembly, used: Assembly, has_prompts: bool) -> None:
        self._recorded, self._used = recorded, used
        self._has_prompts = has_prompts
        self._makers = _makers(used)
        self._unchanged: dict[str, bool] = {}
        self.notes: list[str] = []

    def note(self, instance: Instance, text: str) -> None:
        self.notes.append(f"'{instance.name}' {text}")

    def is_unchanged(self, instance: Instance) -> bool:
        """Return whether its entry and those of the producers it reads from are unchanged."""
        known = self._unchanged.get(instance.name)
        if known is not None:
            return known
        before = self._recorded.instances.get(instance.name)
        same = before is not None and instance.is_entry_of(before)
        self._unchanged[instance.name] = same  # before the recursion, which a cycle would not end
        for key in (*needed_by(instance), *optional_for(instance)) if same else ():
            maker = self._makers.get(key)
            if maker is not None and not self.is_unchanged(maker):
                same = False
        self._unchanged[instance.name] = same
        return same

    def obstacle(self, instance: Instance) -> str | None:
        """Return why the producer cannot run on a recording; None if it can."""
        plugin = instance.plugin
        if isinstance(plugin, AsyncDataProducer):
            return "it calls another server, which a replay does not"
        if isinstance(plugin, KvEventConsumer):
            return "it subscribes to KV events, which are not recorded"
        if TOKENIZED_PROMPT in produced_by(instance):
            return "it reads bodies, which are not recorded"
        parameters = instance.parameters
        if any(key.data_type == LATENCY_PREDICTIONS for key in produced_by(instance)):
            return "it learns from responses, which are not replayed"
        if isinstance(parameters, SessionIdProducerParameters) and parameters.cookie_name:
            return "it reads cookies, which are not recorded"
        return self._missing_prompts() if TOKENIZED_PROMPT in needed_by(instance) else None

    def _missing_prompts(self) -> str | None:
        if not self._has_prompts:
            return "it needs the prompts, which were left out"
        if TOKENIZED_PROMPT not in _makers(self._recorded):
            return "it needs prompts, which no producer made when this was recorded"
        return None


def _beyond_findings(plan: _Plan, used: Assembly) -> Iterable[str]:
    """Yield a note about each changed plugin whose effect a replay cannot show."""
    for one in used.instances.values():
        if plan.is_unchanged(one):
            continue
        if hasattr(one.plugin, "extract"):
            yield f"'{one.name}' reads pages of endpoints: {_APPLIES}"
        if isinstance(one.plugin, _BEFORE_SCHEDULING):
            yield f"'{one.name}' acts before scheduling, which is not replayed"


def _makers(assembly: Assembly) -> Mapping[DataKey[Any], Instance]:
    return {key: one for one in assembly.instances.values() for key in produced_by(one)}
