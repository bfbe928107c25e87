"""A minimal pipeline: parsers, and a scheduler that takes the first candidate."""

from typing import Any

from picker.decisions.steps import BoundPlugin
from picker.plugins.parsers.http_parsers import OpenAIParser, PassthroughParser
from picker.requestcontrol.pipeline import ParserTable, RequestPipeline
from picker.types import SchedulingResult


class FirstCandidate:
    def schedule(self, request: Any, candidates: Any, *_: Any) -> SchedulingResult:
        return SchedulingResult((candidates[0].endpoint,), "default")


def first_candidate() -> RequestPipeline:
    parsers = ParserTable([OpenAIParser(), PassthroughParser()])
    return RequestPipeline(parsers, BoundPlugin(FirstCandidate()))
