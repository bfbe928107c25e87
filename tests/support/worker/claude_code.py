"""The requests that three versions of Claude Code send, and conversations of them with an echo
model.

In the data, `$say` is what the model says next, `$id` the call that a result is of, `$manual` a
text as long as a system prompt, and `$mark` differs from request to request.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import httpx

from tests.support.model.echo_model import call_text

DATA = Path(__file__).parents[2] / "data/claude_code"
VERSIONS = sorted(path.stem for path in DATA.glob("*.json"))
DONE = "All files are read."
MANUAL = "".join(f"Rule {n}: read a file before you change it, and say why.\n" for n in range(250))
NUM_TURNS = 10


@dataclass(frozen=True)
class Turn:
    content: list[dict[str, Any]]
    cached: int
    total: int


def talk(base_url: str, version: str) -> list[Turn]:
    shape = json.loads((DATA / f"{version}.json").read_text())
    paths = [f"/work/src/file {n}.py" for n in range(NUM_TURNS)]
    says = [*(call_text("Read", {"file_path": path}) for path in paths), DONE]
    messages = _filled(shape["first"], say=says[0])
    turns: list[Turn] = []
    with httpx.Client(base_url=base_url, headers=shape["headers"], timeout=300) as client:
        for n in range(NUM_TURNS + 1):
            body = _filled(shape["body"], manual=MANUAL, mark=f"{n:03x}")
            body["messages"] = messages
            turn = _answer(client, body)
            turns.append(turn)
            if n == NUM_TURNS:
                break
            [call] = [block for block in turn.content if block["type"] == "tool_use"]
            assert (call["name"], call["input"]) == ("Read", {"file_path": paths[n]})
            answer = {"role": "assistant", "content": turn.content}
            following = _filled(shape["next"], say=says[n + 1], id=call["id"])
            messages = [*map(_uncached, messages), answer, *following]
    assert turns[-1].content[-1]["text"].endswith(DONE)
    return turns


def _filled(data: Any, **values: str) -> Any:
    escaped = {name: json.dumps(value)[1:-1] for name, value in values.items()}
    return json.loads(Template(json.dumps(data)).safe_substitute(escaped))


def _uncached(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without the mark that is moved to the last one."""
    if isinstance(message["content"], str):
        return message
    blocks = [{k: v for k, v in b.items() if k != "cache_control"} for b in message["content"]]
    return {**message, "content": blocks}


def _answer(client: httpx.Client, body: dict[str, Any]) -> Turn:
    counted = client.post("/v1/messages/count_tokens?beta=true", json=body)
    assert counted.status_code == 200, counted.text
    content: list[dict[str, Any]] = []
    arguments = ""
    usage: dict[str, int] = {}
    with client.stream("POST", "/v1/messages?beta=true", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            delta = event.get("delta", {})
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(content)
                    content.append(event["content_block"])
                    arguments = ""
                case "content_block_delta" if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                case "content_block_delta":
                    kind = delta["type"].removesuffix("_delta")
                    content[-1][kind] += delta[kind]
                case "message_delta":
                    usage = event["usage"]
                    assert delta["stop_reason"] in ("end_turn", "tool_use"), event
                    if content[-1]["type"] == "tool_use":
                        content[-1]["input"] = json.loads(arguments)
                case "error":
                    raise AssertionError(event)
    cached = usage["cache_read_input_tokens"]
    total = usage["input_tokens"] + cached
    assert total == counted.json()["input_tokens"]
    return Turn(content, cached, total)
