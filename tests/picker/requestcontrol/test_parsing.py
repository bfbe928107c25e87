"""Paths to parsers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from picker.errors import RefusedError
from picker.requestcontrol.parsing import ParserTable, request_path
from picker.types import Api, ParsedBody


class Claiming:
    """A parser that only claims."""

    def __init__(self, *claims: str) -> None:
        self.claims = claims

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Accept."""
        return ParsedBody(Api.RAW)


CHAT = Claiming("chat/completions", "/completions/")
GENERATE = Claiming("inference/v1/generate")
SHORT = Claiming("generate")
FALLBACK = Claiming()


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({":path": "/v1/chat/completions?x=/y"}, "/v1/chat/completions"),
        ({"x-original-path": "/a", "x-forwarded-path": "/b"}, "/a"),
        ({"x-forwarded-path": "/b"}, "/b"),
        ({":path": "", "x-original-path": "/a"}, "/a"),
        ({}, "/v1/completions"),
    ],
)
def test_the_path_comes_from_the_first_header_that_has_one(
    headers: dict[str, str], path: str
) -> None:
    """The pseudo-header first, then what the proxy kept, then the oldest API; no query."""
    assert request_path(headers) == path


@pytest.mark.parametrize(
    ("path", "parser"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/tenant/v1/completions", CHAT),
        ("/inference/v1/generate", GENERATE),
        ("/generate", SHORT),
        ("/v1/models", FALLBACK),
    ],
)
def test_the_longest_matching_claim_wins_whatever_the_order(path: str, parser: Claiming) -> None:
    """A short claim never hides a longer one, and the fallback takes only what is left."""
    assert ParserTable([FALLBACK, SHORT, CHAT, GENERATE]).select(path) is parser


def test_equal_claims_go_to_the_parser_configured_first() -> None:
    """The order of the configuration decides ties, also between two fallbacks."""
    twin, second = Claiming("generate"), Claiming()
    table = ParserTable([SHORT, twin, FALLBACK, second])
    assert table.select("/generate") is SHORT
    assert table.select("/other") is FALLBACK


def test_a_path_nobody_takes_is_a_400_that_names_it() -> None:
    """Without a fallback an unknown path is refused."""
    with pytest.raises(RefusedError, match="/v1/models") as refusal:
        ParserTable([CHAT]).select("/v1/models")
    assert refusal.value.status == 400
