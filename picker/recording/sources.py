"""Where a replay takes the findings of a decision from: the recording, or its producers.

A finding is taken as it was recorded while the entry of its producer (type and parameters), and
those of all producers whose findings that one reads, are the same in the configuration that is
replayed. Else the producer is run, if all that it needs is in the recording; what cannot be run is
told, and the recorded findings stand in.

Producers whose findings are recorded are run beside, where they can be: they note for themselves
what they looked up, and learn from it when the request leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from picker.config.build import Assembly
from picker.config.instances import Instance
from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import LATENCY_PREDICTIONS, Attributes, DataKey
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    ConsumesData,
    DataProducer,
    KvEventConsumer,
    MayConsumeData,
    ProducesData,
    RequestProcessor,
    Screener,
)
from picker.plugins.producers.session_id_producer import SessionIdProducerParameters
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.recording.findings import OWN_NOTES
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import Candidate, Endpoint, InferenceRequest

Describe = Callable[[Endpoint], Mapping[str, Any]]
_STANDS_IN = "what was recorded stands in"
_BEFORE_SCHEDULING = (Admitter, RequestProcessor, Screener)


@dataclass(frozen=True, slots=True)
class FindingSources:
    """Fills the findings of decisions. `notes` say what is not as one might think."""

    notes: tuple[str, ...]
    _recorded_producers: frozenset[str]
    _recorded_keys: frozenset[str]
    _beside: tuple[BoundPlugin[DataProducer], ...]
    _run: tuple[BoundPlugin[DataProducer], ...]
    _describers: tuple[Describe, ...]
    _log: PluginLog
    _described: dict[str, tuple[Candidate, Candidate]] = field(default_factory=dict)

    def candidates(self, candidates: tuple[Candidate, ...]) -> Sequence[Candidate]:
        """With the attributes that the configuration gives them."""
        if not self._describers:
            return candidates
        return [self._with_attributes(one) for one in candidates]

    def fill(
        self, recorded: Attributes, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> tuple[Attributes, InferenceRequest]:
        """The findings that the scheduler is shown, and the request as producers leave it."""
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
                log.exception(producer.name, error, "scheduling goes on with what is known")
                break
        return attributes, request

    def _note(
        self,
        producer: BoundPlugin[DataProducer],
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
    ) -> None:
        """Let `producer` note what it needs for itself; its findings do not count."""
        beside, log = Attributes(), self._log
        for key, value in attributes.items():
            beside[key] = value
        try:
            producer.plugin.produce(request, candidates, producer.scoped(beside))
        except Exception as error:
            log.exception(producer.name, error, "its memory may differ from what it was")
        for key, value in beside.items():
            if key.data_type in OWN_NOTES:
                attributes[key] = value

    def _with_attributes(self, candidate: Candidate) -> Candidate:
        known = self._described.get(candidate.key)
        if known is None or known[0] is not candidate:
            attributes = dict(candidate.attributes)
            for describe in self._describers:
                attributes.update(describe(candidate.endpoint))
            known = self._described[candidate.key] = (
                candidate,
                replace(candidate, attributes=attributes),
            )
        return known[1]


def finding_sources(
    recorded: Assembly, used: Assembly, *, has_prompts: bool, log: PluginLog
) -> FindingSources:
    """How `used` gets the findings of decisions that `recorded` made."""
    plan = _Plan(recorded, used, has_prompts)
    kept: list[Instance] = []
    run: list[BoundPlugin[Any]] = []
    beside: list[BoundPlugin[Any]] = []
    for producer in used.producers:
        instance = used.instances[producer.name]
        reason = plan.obstacle(instance)
        if plan.is_unchanged(instance):
            kept.append(instance)
            if reason is None and isinstance(producer.plugin, DataProducer):
                beside.append(producer)
        elif reason is None and isinstance(producer.plugin, DataProducer):
            run.append(producer)
            plan.note(instance, "is not as it was recorded: it is run")
        else:
            kept.append(instance)
            plan.note(instance, f"is not as it was recorded, but {reason}: {_STANDS_IN}")
    others = {
        one.name
        for one in used.instances.values()
        if plan.is_unchanged(one) and not isinstance(one.plugin, DataProducer | AsyncDataProducer)
    }
    return FindingSources(
        notes=(*plan.notes, *_beyond_findings(plan, used)),
        _recorded_producers=frozenset({one.name for one in kept} | others),
        _recorded_keys=frozenset(str(key) for one in kept for key in _made_by(one)),
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
    """Knows what has changed, and what stands in the way. Owns the notes."""

    def __init__(self, recorded: Assembly, used: Assembly, has_prompts: bool) -> None:
        self._recorded, self._used = recorded, used
        self._has_prompts = has_prompts
        self._makers = _makers(used)
        self._unchanged: dict[str, bool] = {}
        self.notes: list[str] = []

    def note(self, instance: Instance, text: str) -> None:
        """Tell this of a plugin."""
        self.notes.append(f"'{instance.name}' {text}")

    def is_unchanged(self, instance: Instance) -> bool:
        """Whether its entry, and those of the producers it reads from, are as they were."""
        known = self._unchanged.get(instance.name)
        if known is not None:
            return known
        before = self._recorded.instances.get(instance.name)
        same = before is not None and instance.is_entry_of(before)
        self._unchanged[instance.name] = same  # also ends a loop
        for key in _read_by(instance) if same else ():
            maker = self._makers.get(key)
            if maker is not None and not self.is_unchanged(maker):
                same = False
        self._unchanged[instance.name] = same
        return same

    def obstacle(self, instance: Instance) -> str | None:
        """Why the producer cannot be run on what is recorded; None: it can."""
        plugin = instance.plugin
        if isinstance(plugin, AsyncDataProducer):
            return "it asks others, which a replay does not"
        if isinstance(plugin, KvEventConsumer):
            return "it hears engines, of which nothing is recorded"
        if TOKENIZED_PROMPT in _made_by(instance):
            return "it reads bodies, which are not recorded"
        parameters = instance.parameters
        if any(key.data_type == LATENCY_PREDICTIONS for key in _made_by(instance)):
            return "it learns from responses, which are not replayed"
        if isinstance(parameters, SessionIdProducerParameters) and parameters.cookie_name:
            return "it reads cookies, which are not recorded"
        return self._missing_prompts() if TOKENIZED_PROMPT in _consumed_by(instance) else None

    def _missing_prompts(self) -> str | None:
        if not self._has_prompts:
            return "it needs the prompts, which were left out"
        if TOKENIZED_PROMPT not in _makers(self._recorded):
            return "it needs prompts, which nobody made when this was recorded"
        return None


def _beyond_findings(plan: _Plan, used: Assembly) -> Iterable[str]:
    """What of the configuration the recording holds no answer to."""
    for one in used.instances.values():
        if plan.is_unchanged(one):
            continue
        if hasattr(one.plugin, "extract"):
            yield f"'{one.name}' reads pages of endpoints: {_STANDS_IN}"
        if isinstance(one.plugin, _BEFORE_SCHEDULING):
            yield f"'{one.name}' acts before scheduling, which is not replayed"


def _makers(assembly: Assembly) -> Mapping[DataKey[Any], Instance]:
    return {key: one for one in assembly.instances.values() for key in _made_by(one)}


def _made_by(instance: Instance) -> tuple[DataKey[Any], ...]:
    return instance.plugin.produces if isinstance(instance.plugin, ProducesData) else ()


def _consumed_by(instance: Instance) -> tuple[DataKey[Any], ...]:
    return instance.plugin.consumes if isinstance(instance.plugin, ConsumesData) else ()


def _read_by(instance: Instance) -> tuple[DataKey[Any], ...]:
    plugin = instance.plugin
    wished = plugin.may_consume if isinstance(plugin, MayConsumeData) else ()
    return (*_consumed_by(instance), *wished)
