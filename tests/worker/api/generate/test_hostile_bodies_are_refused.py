"""Bodies that the routes of other APIs must refuse, each with a sentence that names the fault."""

import json
from typing import Any

import pytest

DEEP: Any = "x"
for _ in range(80):
    DEEP = [DEEP]

SCHEMA: Any = {"type": "json_schema", "name": "s", "schema": {"type": 1}}
USER: Any = {"role": "user", "content": "a"}
ASKED: Any = {"messages": [USER], "max_tokens": 4}
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t"}
CLAUDES: Any = {"name": "f", "input_schema": {"type": "object"}}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}], "max_tokens": 4}


RESPONSES: list[tuple[Any, str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 1}, "input"),
    ({"input": "a", "unknown": 1}, "unknown"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "c"}, "conversation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "include": ["file_search_call.nope"]}, "include"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
    ({"input": "a", "temperature": 3}, "temperature"),
    ({"input": "a", "top_p": 0}, "top_p"),
    ({"input": "a", "top_logprobs": 50}, "logprobs"),
    ({"input": "a", "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "a", "tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"input": "a", "tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"input": "a", "tools": [TOOL] * 1000}, "tools"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"input": "a", "tools": [TOOL], "tool_choice": {"name": "g"}}, "tool_choice"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
    (
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": 1}}},
        },
        "text.format.schema",
    ),
    (item(type="image", role="user"), "input[0].type"),
    (item(role="king", content="a"), "input[0].role"),
    (item(content="a"), "input[0].role"),
    (item(role="user"), "input[0].content"),
    (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0]"),
    (item(role="user", content=[{"type": "input_text"}]), "input[0].content[0]"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[0].name"),
    (item(type="function_call_output", output="a"), "input[0].call_id"),
    (item(role="user", content=DEEP), "nested"),
    ({"input": [USER] * 5000}, "input"),
    ({"input": "a " * 100_000}, "maximum context length"),
    ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ({"input": "a", "reasoning": {"effort": "most"}}, "reasoning.effort"),
]
MESSAGES: list[tuple[Any, str]] = [
    ({}, "messages"),
    ({"messages": [USER]}, "max_tokens"),
    ({"messages": [], "max_tokens": 4}, "messages"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_tokens": "4"}, "max_tokens"),
    ({**ASKED, "n": 2}, "n"),
    ({"messages": [{**USER, "role": "tool"}], "max_tokens": 4}, "messages[0].role"),
    ({**ASKED, "system": [{"type": "image", "text": "a"}]}, "system"),
    ({**ASKED, "stop_sequences": [""]}, "stop_sequences"),
    ({**ASKED, "stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({**ASKED, "temperature": -1}, "temperature"),
    ({**ASKED, "thinking": {"type": "deep"}}, "thinking.type"),
    ({**ASKED, "mcp_servers": [{}]}, "mcp_servers"),
    ({**ASKED, "tools": [{"name": "f"}]}, "input_schema"),
    ({**ASKED, "tools": [{**CLAUDES, "type": "bash"}]}, "tools[0].type"),
    ({**ASKED, "tools": [CLAUDES, CLAUDES]}, "tools[1].name"),
    ({**ASKED, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({**ASKED, "tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({**ASKED, "tool_choice": {"type": "any"}}, "tool_choice"),
    (said({"type": "image", "source": {"type": "url"}}), "messages[0].content[0].type"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"type": "tool_use", "id": "t", "name": "f", "input": {}}), "tool_use"),
    (said({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
    (
        said({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "text blocks",
    ),
    (said(RESULT, role="assistant"), "tool_result"),
    (said(DEEP), "nested"),
]
GENERATE: list[tuple[Any, str]] = [
    ({}, "text or input_ids"),
    ({"text": "a", "input_ids": [1]}, "text or input_ids"),
    ({"text": []}, "text"),
    ({"text": [1]}, "text"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [10**6]}, "vocabulary"),
    ({"input_ids": [[1], 2]}, "input_ids must be"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params"),
    ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
    ({"text": "a", "image_data": ["x"]}, "image_data"),
    ({"prompt": "a", "text": "b"}, "text"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": ["a"]}, "prompt"),
]
EMBEDDINGS: list[tuple[Any, str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["a", 1]}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [10**6]}, "vocabulary"),
    ({"input": ["a"] * 1025}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 5}, "dimensions"),
    ({"input": "a", "dimensions": 1.5}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "task": "classify"}, "task"),
    ({"input": "a", "priority": 1 << 70}, "priority"),
]
BATCH: list[tuple[Any, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [[]]}, "messages"),
    ({"messages": [USER]}, "messages"),
    ({"messages": [[USER]], "stream": True}, "stream"),
    ({"messages": [[USER]], "n": 2}, "n"),
    ({"messages": [[USER], [{**USER, "role": "king"}]]}, "messages[1][0].role"),
    ({"messages": [[USER]], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
]
CASES = [
    *(("/v1/responses", *case) for case in RESPONSES),
    *(("/v1/messages", *case) for case in MESSAGES),
    *(("/generate", *case) for case in GENERATE),
    *(("/v1/embeddings", *case) for case in EMBEDDINGS),
    *(("/v1/chat/completions/batch", *case) for case in BATCH),
]


@pytest.mark.parametrize(
    ("path", "body", "named"), CASES, ids=[f"{path}-{n}" for n, (path, *_) in enumerate(CASES)]
)
async def test_a_hostile_body_is_refused_by_name(
    bench: Any, path: str, body: Any, named: str
) -> None:
    settings = {"embedding_size": 4, "enable_priority": False, "strict_fields": True}
    response = await bench.post(path, body, **settings)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert named in error["message"]
    assert bench.engine.requests == []


@pytest.mark.parametrize("path", sorted({path for path, *_ in CASES}))
async def test_a_foreign_model_is_not_found(bench: Any, path: str) -> None:
    bodies: dict[str, Any] = {
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [USER], "max_tokens": 4},
        "/generate": {"text": "a"},
        "/v1/embeddings": {"input": "a"},
        "/v1/chat/completions/batch": {"messages": [[USER]]},
    }
    async with bench.client() as client:
        response = await client.post(path, content=json.dumps({**bodies[path], "model": "other"}))
    assert response.status_code == 404
    assert "`other` does not exist" in response.json()["error"]["message"]
