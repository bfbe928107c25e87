"""Identities of agents and of sessions."""

import pytest
from msgspec.structs import replace

from picker.framework.attributes import AGENT_IDENTITY, SESSION_ID, Attributes, DataKey
from picker.framework.interfaces import DataProducer, ProducesData, RequestProcessor
from tests.support.picker.plugin_scenes import configured, request_for

CLAUDE, OPENCODE, CODEX, OLD_CODEX = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)


@pytest.mark.parametrize(
    ("extra", "headers", "expected"),
    [
        ([], {CLAUDE: "a"}, "a"),
        ([], {OPENCODE: "a"}, "a"),
        ([], {CODEX: "a"}, "a"),
        ([], {OLD_CODEX: "a"}, "a"),
        ([], {OLD_CODEX: "d", CODEX: "c", OPENCODE: "b", CLAUDE: "a"}, "a"),
        ([], {OLD_CODEX: "d", CODEX: "c", CLAUDE: "  "}, "c"),
        (["X-Mine", "x-other"], {CLAUDE: "a", "x-other": "o"}, "o"),
        (["X-Mine", "x-other"], {"x-mine": " m ", "x-other": "o"}, "m"),
        (["x-mine"], {"x-mine": "", CLAUDE: "a"}, "a"),
        ([], {"x-session-id": "s"}, None),
        ([], {}, None),
    ],
)
def test_the_first_header_with_a_value_is_the_identity(
    extra: list[str], headers: dict[str, str], expected: str | None
) -> None:
    plugin = configured("agent-identity", {"additionalSessionHeaders": extra}, "mine")
    assert isinstance(plugin, RequestProcessor)
    assert isinstance(plugin, DataProducer)
    request = replace(request_for(), headers=headers)
    assert plugin.process(request).fairness_id == (expected or "default-flow")
    attributes = Attributes()
    assert plugin.produce(request, [], attributes) is request
    assert attributes.get(DataKey(AGENT_IDENTITY, "mine")) == expected
    assert plugin.produces == (DataKey(AGENT_IDENTITY, "mine"),)


@pytest.mark.parametrize(
    "header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"]
)
def test_a_fairness_header_comes_first(header: str) -> None:
    plugin = configured("agent-identity")
    named = replace(request_for(), headers={header: "user-123", CLAUDE: "session-abc"})
    assert plugin.process(named) is named
    attributes = Attributes()
    plugin.produce(named, [], attributes)
    assert attributes.get(DataKey(AGENT_IDENTITY, "agent-identity")) == "session-abc"
    empty = replace(request_for(), headers={header: "", CLAUDE: "session-abc"})
    assert plugin.process(empty).fairness_id == "session-abc"


@pytest.mark.parametrize(
    ("parameters", "headers", "expected"),
    [
        ({"headerName": "X-Session"}, {"x-session": " abc "}, "abc"),
        ({"headerName": "x-session"}, {"x-session": ""}, None),
        ({"headerName": "x-session"}, {"x-session": "  "}, None),
        ({"headerName": "x-session"}, {"x-other": "abc"}, None),
        ({"headerName": "x-session"}, {"cookie": "x-session=abc"}, None),
        ({"cookieName": "sid"}, {"cookie": "sid=abc"}, "abc"),
        ({"cookieName": "sid"}, {"cookie": "a=b; sid=abc; sid=second"}, "abc"),
        ({"cookieName": "sid"}, {"cookie": 'sid="quoted value"'}, "quoted value"),
        ({"cookieName": "sid"}, {"cookie": "sid=a=b"}, "a=b"),
        ({"cookieName": "sid"}, {"cookie": "SID=abc"}, None),
        ({"cookieName": "sid"}, {"cookie": "xsid=abc;sid"}, None),
        ({"cookieName": "sid"}, {"cookie": "sid="}, None),
        ({"cookieName": "sid"}, {"cookie": 'sid="'}, '"'),
        ({"cookieName": "sid"}, {"cookie": ";;=;sid = abc ;"}, "abc"),
        ({"cookieName": "sid"}, {}, None),
        ({"cookieName": "sid"}, {"sid": "abc"}, None),
    ],
)
def test_the_session_is_read_from_its_one_source(
    parameters: dict[str, str], headers: dict[str, str], expected: str | None
) -> None:
    producer = configured("session-id-producer", parameters, "mine")
    assert isinstance(producer, DataProducer)
    assert isinstance(producer, ProducesData)
    assert producer.produces == (DataKey(SESSION_ID, "mine"),)
    request, attributes = replace(request_for(), headers=headers), Attributes()
    assert producer.produce(request, [], attributes) is request
    assert attributes.get(DataKey(SESSION_ID, "mine")) == expected
