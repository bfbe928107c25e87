"""What producers found ↔ what a recording holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picker.framework.attributes import (
    AGENT_IDENTITY,
    PEER_ENDPOINT,
    SESSION_ID,
    Attributes,
    DataKey,
)
from picker.recording.privacy import Digests
from picker.recording.values import NotReplayableError, recordable, restored

# Findings that a producer makes for itself, to be told later what it looked up: no decision reads
# them, and a replay makes them anew.
OWN_NOTES = frozenset(
    ("BlockHashes", "BlockKeys", "InFlightHold", "LatencyFeatures", "P2pSources", "Span")
)
# Made while a decision is made, and so again while it is made again.
_OF_SCHEDULING = frozenset((PEER_ENDPOINT, "Recorded", "SessionSeen"))
# Ids that clients may take for secrets; decisions compare them and no more.
_IDENTITIES = frozenset((AGENT_IDENTITY, SESSION_ID))


def findings_line(
    attributes: Attributes, digests: Digests
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Findings by "Type/producer", and the names of those that no recording can hold."""
    told: dict[str, Any] = {}
    left_out = []
    for key, value in attributes.items():
        data_type = key.data_type
        if data_type in OWN_NOTES or data_type in _OF_SCHEDULING:
            continue
        try:
            if "/" in data_type:
                raise NotReplayableError(data_type)
            if data_type in _IDENTITIES and isinstance(value, str):
                value = digests.of(value)
            told[str(key)] = recordable(value)
        except NotReplayableError:
            left_out.append(str(key))
    return told, tuple(left_out)


def findings_of(line: Mapping[str, Any]) -> Attributes:
    """The findings of a line, in their order. Raises `ValueError` for what is no finding."""
    attributes = Attributes()
    for name, value in line.items():
        data_type, slash, producer = name.partition("/")
        if not slash:
            raise ValueError(f"the finding '{name}' names no producer")
        key: DataKey[Any] = DataKey(data_type, producer)
        attributes[key] = restored(value)
    return attributes
