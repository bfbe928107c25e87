"""Paths to parsers."""

from collections.abc import Mapping

import pytest

from picker.errors import RefusedError
from picker.requestcontrol.headers import target_of
from picker.requestcontrol.pipeline import ParserTable
from picker.types import Api, ParsedBody


class Claiming:
    def __init__(self, *claims: str) -> None:
        self.claims = claims

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        return ParsedBody(Api.RAW)


CHAT = Claiming("chat/completions", "/completions/")
GENERATE = Claiming("inference/v1/generate")
SHORT = Claiming("generate")
VERTEX = Claiming("PredictionService/ChatCompletions")
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
    assert target_of(headers).partition("?")[0] == path


@pytest.mark.parametrize(
    ("path", "parser"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/tenant/v1/completions", CHAT),
        ("completions", CHAT),
        ("/inference/v1/generate", GENERATE),
        ("/generate", SHORT),
        ("/v1/projects/p/PredictionService/ChatCompletions", VERTEX),
        ("/google.cloud.aiplatform.v1beta1.PredictionService/ChatCompletions", VERTEX),
        ("/v1/models", FALLBACK),
        ("/foocompletions", FALLBACK),
        ("/regenerate", FALLBACK),
        ("/v1/completions/more", FALLBACK),
        ("/", FALLBACK),
        ("", FALLBACK),
    ],
)
def test_the_longest_matching_claim_wins_whatever_the_order(path: str, parser: Claiming) -> None:
    assert ParserTable([SHORT, CHAT, GENERATE, VERTEX, FALLBACK]).select(path) is parser


def test_equal_claims_go_to_the_parser_configured_first() -> None:
    twin = Claiming("generate")
    assert ParserTable([SHORT, twin, FALLBACK]).select("/generate") is SHORT
    assert ParserTable([twin, SHORT, FALLBACK]).select("/generate") is twin


def test_parsers_after_a_fallback_are_unused_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = ParserTable([SHORT, FALLBACK, CHAT, Claiming()])
    assert table.select("/generate") is SHORT
    assert table.select("/v1/chat/completions") is FALLBACK
    assert table.select("/other") is FALLBACK
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "Claiming is unused" in caplog.text


def test_without_a_fallback_nothing_is_unused(caplog: pytest.LogCaptureFixture) -> None:
    ParserTable([SHORT, CHAT])
    assert not caplog.records


def test_a_path_without_a_parser_is_a_400_that_names_it() -> None:
    with pytest.raises(RefusedError, match="/v1/models") as refusal:
        ParserTable([CHAT]).select("/v1/models")
    assert refusal.value.status == 400
