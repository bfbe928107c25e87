"""Runs the data producers of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeGuard

from picker.framework.attributes import Attributes
from picker.framework.interfaces import AsyncDataProducer, DataProducer
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import Candidate, InferenceRequest

CONSEQUENCE = "scheduling goes on with what is known"


async def produce(
    producers: Sequence[DataProducer | AsyncDataProducer],
    request: InferenceRequest,
    candidates: Sequence[Candidate],
    attributes: Attributes,
    log: PluginLog,
) -> InferenceRequest:
    """`request`, enriched, with the findings in `attributes`.

    The producers run in order; one that fails or takes too long ends the finding out (those after
    it may need what it would have found), never the request.
    """
    for producer in producers:
        try:
            if _asks_others(producer):
                async with asyncio.timeout(producer.timeout_seconds):
                    request = await producer.look_up(request, candidates, attributes)
            elif _finds_itself(producer):
                request = producer.produce(request, candidates, attributes)
        except Exception as error:
            log.exception(producer, error, CONSEQUENCE)
            break
    return request


# An `isinstance` of a protocol costs ten times as much as these, for every producer and request.


def _asks_others(producer: object) -> TypeGuard[AsyncDataProducer]:
    return hasattr(producer, "look_up")


def _finds_itself(producer: object) -> TypeGuard[DataProducer]:
    return hasattr(producer, "produce")
