"""agent-identity: an agent's session is a flow."""

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes, agent_identity_key
from picker.framework.interfaces import DataProducer, RequestProcessor
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
    assert attributes.get(agent_identity_key("mine")) == expected
    assert plugin.produces == (agent_identity_key("mine"),)


@pytest.mark.parametrize(
    "header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"]
)
def test_a_fairness_header_comes_first(header: str) -> None:
    plugin = configured("agent-identity")
    named = replace(request_for(), headers={header: "user-123", CLAUDE: "session-abc"})
    assert plugin.process(named) is named
    attributes = Attributes()
    plugin.produce(named, [], attributes)
    assert attributes.get(agent_identity_key()) == "session-abc"
    empty = replace(request_for(), headers={header: "", CLAUDE: "session-abc"})
    assert plugin.process(empty).fairness_id == "session-abc"
