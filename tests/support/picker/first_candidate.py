"""A minimal pipeline: parsers, and a scheduler that takes the first candidate."""

from collections.abc import Sequence
from random import Random

from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.framework.attributes import Attributes
from picker.plugins.parsers.http_parsers import OpenAIParser, PassthroughParser
from picker.requestcontrol.pipeline import ParserTable, RequestPipeline
from picker.types import Candidate, InferenceRequest, SchedulingResult


class FirstCandidate:
    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
        steps: PluginSteps,
    ) -> SchedulingResult:
        return SchedulingResult((candidates[0].endpoint,), "default")


def first_candidate() -> RequestPipeline:
    parsers = ParserTable([OpenAIParser(), PassthroughParser()])
    return RequestPipeline(parsers, BoundPlugin(FirstCandidate()))
