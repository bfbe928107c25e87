"""The parser that looks at nothing."""

from __future__ import annotations

from picker.framework.interfaces import Parser
from picker.plugins.parsers.passthrough_parser import PLUGIN
from picker.types import Api, ParsedBody


def test_any_bytes_stay_raw() -> None:
    """No body is wrong, and nothing is known about one."""
    parser = PLUGIN.make("mine", PLUGIN.parameters())
    assert isinstance(parser, Parser)
    for body in (b"", b"\xff\x00", b'{"model":"m"}'):
        assert parser.parse("/x", {}, body) == ParsedBody(Api.RAW, can_rewrite=False)


def test_it_claims_no_path_and_so_takes_what_is_left() -> None:
    """A parser without claims is the fallback."""
    assert PLUGIN.name == "passthrough-parser"
    assert PLUGIN.make("mine", PLUGIN.parameters()).claims == ()
