"""The OpenAI generation API in three parts, for those who serve it: `TextSide` is the model's text,
`RequestPreparer` turns bodies into requests to the engine, `Runner` runs them and answers.
"""

from __future__ import annotations

from worker.api.arrival import Arrival, arrival_of
from worker.api.prepare import RequestPreparer
from worker.api.prepared import Prepared
from worker.api.runner import Runner
from worker.api.text import ChatOptions, TextSide

__all__ = [
    "Arrival",
    "ChatOptions",
    "Prepared",
    "RequestPreparer",
    "Runner",
    "TextSide",
    "arrival_of",
]
