"""Keeps every body raw; takes the paths that no other parser claims."""

from __future__ import annotations

from collections.abc import Mapping

from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Api, ParsedBody


class PassthroughParser:
    """Knows nothing about a body, so nothing in it can be wrong. No model, no prompt, no usage."""

    claims: tuple[str, ...] = ()

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Accept anything."""
        return ParsedBody(Api.RAW, can_rewrite=False)


PLUGIN = PluginType("passthrough-parser", Parameters, plain(PassthroughParser))
