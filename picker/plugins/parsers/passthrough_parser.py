"""passthrough-parser: keeps every body raw; takes the paths that no other parser claims."""

from collections.abc import Mapping

from picker.framework.registry import PluginType
from picker.types import Api, ParsedBody


class PassthroughParser:
    """Accepts every body and reads no model, prompt or usage."""

    claims: tuple[str, ...] = ()

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        return ParsedBody(Api.RAW, can_rewrite=False)


PLUGIN = PluginType("passthrough-parser", PassthroughParser)
