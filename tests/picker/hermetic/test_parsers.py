"""Every API that a request may speak, through the whole picker: paths, prompts, models, usage."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode

from fleet.commands.cli import main
from picker.cli.options import RecordFlags
from tests.support.picker.ext_proc_stream import GatewayStream, directed
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import HEAD, whole_picker
from tests.support.waiting import until

EVERY_PARSER = (
    HEAD
    + """
plugins:
- {type: queue-scorer}
- {type: prefix-cache-scorer}
- {type: openai-parser}
- {type: anthropic-parser}
- {type: vllmhttp-parser}
- {type: sglanghttp-parser}
- {type: passthrough-parser}
requestHandler:
  parsers:
  - {pluginRef: openai-parser}
  - {pluginRef: anthropic-parser}
  - {pluginRef: sglanghttp-parser}
  - {pluginRef: vllmhttp-parser}
  - {pluginRef: passthrough-parser}
"""
)
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
BLOCKS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}


def bytes_of(members: dict[str, Any]) -> bytes:
    return json.dumps(members).encode()


MODELLED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions/", BLOCKS),
    ("/v1/chat/completions?beta=true", CHAT),
    ("/v1/chat/completions/render", CHAT),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/v1/completions/render", {"prompt": "hello"}),
    ("/v1/messages/count_tokens", CHAT),
    ("/prefix/of/a/gateway/v1/completions", {"prompt": "hello"}),
    ("/v1/embeddings", {"input": "hello"}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", CHAT),
    ("/pooling", {"input": "hello"}),
    ("/pooling", CHAT),
    ("/v1/chat/completions/batch", {"messages": [CHAT["messages"], BLOCKS["messages"]]}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hello"}]}),
    ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "x"}]}),
    ("/v1/images/generations", {"prompt": "a train"}),
    ("/v1/messages", CHAT | {"max_tokens": 5}),
    ("/v1/messages", BLOCKS | {"system": "be brief"}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3]}),
]


async def test_a_request_with_a_model_is_passed_or_renamed(tmp_path: Path) -> None:
    one = pods(page(model="m"))
    async with whole_picker(tmp_path, one, EVERY_PARSER) as picker:
        for path, members in MODELLED:
            body = bytes_of({"model": "m", **members})
            texts = {name: json.dumps(value) for name, value in ({"model": "n"} | members).items()}
            renamed = ",".join(f'"{name}":{text}' for name, text in sorted(texts.items()))
            assert await picker.ask(body, path=path) == directed(one[0].host_port, body), path
            said = await picker.ask(body, {"x-llm-d-model-name-rewrite": "n"}, path=path)
            assert said == directed(one[0].host_port, f"{{{renamed}}}".encode()), path
            plain = bytes_of(members)
            assert await picker.ask(plain, path=path) == directed(one[0].host_port, plain), path
        assert await picker.requests(model_name="m") == 2 * len(MODELLED)


HALVES: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", rb'{"messages":[{"content":"cut \ud83d","role":"user"}],"model":"m"}'),
    (
        "/v1/chat/completions",
        rb'{"messages":[{"content":[{"text":"\uDE00!","type":"text"}],"role":"user"}],"model":"m"'
        rb',"tools":[{"\ud83d":"\ud83d\ude00\ud83d"}]}',
    ),
    ("/v1/completions", rb'{"model":"m","prompt":"cut \ud83d"}'),
    ("/v1/completions", rb'{"model":"m","prompt":["\ud83d","\ude00"]}'),
    ("/v1/completions", rb'{"model":"m","prompt":"x","user":"\ud83d"}'),
    ("/v1/embeddings", rb'{"input":"cut \ud83d","model":"m"}'),
    ("/v1/responses", rb'{"input":"cut \ud83d","instructions":"\ud83d","model":"m"}'),
    ("/v1/conversations", rb'{"items":[{"content":"cut \ud83d"}],"model":"m"}'),
    ("/v1/images/generations", rb'{"model":"m","prompt":"cut \ud83d"}'),
    ("/v1/messages", rb'{"messages":[{"content":"cut \ud83d","role":"user"}],"model":"m"}'),
    (
        "/inference/v1/generate",
        rb'{"cache_salt":"\ud83d","features":{"mm_hashes":{"\ud83d":["\ud83d"]},"mm_placeholders":'
        rb'{"\ud83d":[{"length":1,"offset":0}]}},"model":"m","token_ids":[1,2,3]}',
    ),
]


async def test_half_a_character_is_routed_unchanged(tmp_path: Path, capsys: Any) -> None:
    one, recording = pods(page(model="m")), tmp_path / "recording.jsonl"
    flags = RecordFlags(recording)
    async with whole_picker(tmp_path, one, EVERY_PARSER, record=flags) as picker:
        for path, body in HALVES:
            assert await picker.ask(body, path=path) == directed(one[0].host_port, body), body
            renamed = body.replace(b'"model":"m"', b'"model":"n"')
            headers = {"x-llm-d-model-name-rewrite": "n", "x-request-id": f"id-{hash(body)}"}
            said = await picker.ask(body, headers, path=path)
            assert said == directed(one[0].host_port, renamed), body
            status, explained = await picker.get(f"/decisions/id-{hash(body)}")
            assert (status, one[0].host_port in explained) == (200, True)
        assert await picker.requests(model_name="m") == 2 * len(HALVES)
        body = rb'{"prompt":"x", "model":"cut \ud83d"}'
        assert await picker.ask(body) == directed(one[0].host_port, body)
    assert main(["replay", str(recording)]) == 0
    number = 2 * len(HALVES) + 1
    assert f"{number} decisions, {number} identical" in capsys.readouterr().out


RAW: list[tuple[str, bytes]] = [
    ("/generate", rb'{"input_ids":[1],"extra_key":"\ud83d"}'),
    ("/generate", bytes_of({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}})),
    ("/generate", bytes_of({"text": "hello"})),
    ("/generate", bytes_of({"inputs": "hello"})),
    ("/v2/models/m/generate", bytes_of({"text_input": "hello"})),
    ("/tokenize", b"whatever \xff it is"),
    ("/v1/audio/transcriptions", b"--boundary\r\n\r\n\x00\x01"),
    ("/v1/foocompletions", b"{}"),
]


DEEP = b"[" * 800 + b"]" * 800
ODD: list[tuple[str, bytes]] = [
    ("/v1/completions", b'{"model":"m","prompt":"p","a":' + DEEP + b"}"),
    ("/v1/completions", b'{"model":"m","prompt":"p","a":-' + b"9" * 4000 + b"}"),
    ("/v1/completions", b'{"model":"m","prompt":"p","max_tokens":' + b"9" * 400 + b"}"),
    ("/v1/completions", b'{"model":"x","model":"m","prompt":3,"prompt":"p"}'),
    ("/v1/chat/completions", b'{"model":"m","messages":[{}],"tools":[' + b"9" * 4000 + b"]}"),
    ("/v1/responses", b'{"model":"m","input":[99999999999999999999,' + DEEP + b"]}"),
    ("/v1/conversations", b'{"model":"m","items":[{"content":[null,' + b"9" * 99 + b"]}]}"),
    ("/v1/messages", b'{"model":"m","messages":[{"content":[{"type":"tool_use","input":[[]]}]}]}'),
    ("/v1/messages", b'{"model":"m","messages":[{"content":[{"type":"tool_result"}]}]}'),
]


async def test_odd_bodies_are_routed_unchanged(tmp_path: Path, caplog: Any) -> None:
    one = pods(page())
    async with whole_picker(tmp_path, one, EVERY_PARSER) as picker:
        for path, body in ODD:
            assert await picker.ask(body, path=path) == directed(one[0].host_port, body), body
        for path, body in RAW:
            said = await picker.ask(body, {"x-llm-d-model-name-rewrite": "n"}, path=path)
            assert said == directed(one[0].host_port, body), body
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


BAD: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", b'{"model":"m","messages":{}}'),
    ("/v1/chat/completions", b'{"model":"m","messages":[{"content":{}}]}'),
    ("/v1/completions", b'{"model":"m","prompt":[1,"a"]}'),
    ("/v1/completions", b'{"model":"m","prompt":[-1]}'),
    ("/v1/completions", b'{"model":"m","prompt":[4294967296]}'),
    ("/v1/completions", b'{"model":"m","prompt":[]}'),
    ("/v1/completions", b'{"model":"m","prompt":""}'),
    ("/v1/completions", b'{"model":"m","prompt_embeds":"AAAA","max_tokens":1}'),
    ("/v1/completions", b'{"model":"m","prompt":null,"prompt_embeds":["AAAA"]}'),
    ("/pooling", b'{"model":"m","data":{"data":"https://a/x.tif"},"softmax":false}'),
    ("/v1/responses", b'{"model":"m","prompt":{"id":"p"}}'),
    ("/v1/chat/completions", b'{"model":"m","messages":[]}'),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b"null"),
    ("/v1/completions", b'{"model":"m","prompt":"p"'),
    ("/v1/completions", b'{"model":"m","prompt":"\xff"}'),
    ("/v1/completions", b"[" * 100_000),
    ("/v1/images/generations", b'{"model":"m","prompt":["p"]}'),
    ("/v1/messages", b'{"model":"m","messages":[]}'),
    ("/v1/messages", b'{"model":"m","messages":[{"content":7}]}'),
    ("/inference/v1/generate", b'{"model":"m","token_ids":[]}'),
    ("/inference/v1/generate", b'{"model":"m","token_ids":[1.5]}'),
    ("/generate", b'{"text":["hello",7]}'),
    ("/generate", b'{"input_ids":[[1],[]]}'),
    ("/generate", b'{"input_ids":[1],"extra_key":7}'),
    ("/v1/chat/completions/batch", b'{"model":"m","messages":[{"role":"user"}]}'),
    ("/pooling", b'{"model":"m"}'),
    ("/pooling", b'{"model":"m","messages":[]}'),
    ("/v1/chat/completions", b'{"model":"m","messages":[{"role":123,"content":"x"}]}'),
    ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user"}],"tools":"x"}'),
    ("/v1/chat/completions", b'{"model":"m","messages":[null]}'),
    ("/v1/chat/completions", b'{"a":' * 100_000),
    ("/v1/completions", b'{"model":"m","prompt":"p","a":1e999}'),
    ("/v1/completions", b'{"model":"m","prompt":"p","a":-' + b"9" * 9999 + b"}"),
    ("/v1/completions", b'{"model":"m","prompt":"p","a":NaN}'),
    ("/v1/completions", b'{"model":"m","prompt":"p","a":-Infinity}'),
    ("/v1/completions", b'{"model":"m","prompt":"p","cache_salt":[]}'),
    ("/v1/completions", b'{"model":"m","prompt":"p","prompt":null}'),
    ("/v1/completions", rb'{"model":"m","prompt":"\ud8"}'),
    ("/v1/completions", rb'{"model":"m","prompt":"\ud83d","a":"\x"}'),
    ("/v1/completions", b'\xef\xbb\xbf{"model":"m","prompt":"p"}'),
    ("/v1/completions", b'{"model":"m","prompt":"\xed\xa0\xbd"}'),
    ("/v1/conversations", b'{"model":"m","items":[1]}'),
    ("/v1/embeddings", b'{"model":"m","input":{}}'),
    ("/v1/messages", b'{"model":"m","messages":[{"role":[]}]}'),
    ("/v1/messages", b"null"),
    ("/inference/v1/generate", b'{"model":"m","token_ids":[1],"features":[]}'),
    ("/inference/v1/generate", b'{"model":"m","token_ids":[1],"features":{"mm_hashes":{"a":1}}}'),
    ("/inference/v1/generate", b'{"model":"m","token_ids":[1],"features":{"mm_hashes":[]}}'),
    ("/generate", b"null"),
    ("/generate", b'{"input_ids":[true]}'),
]
PYTHONS = (b"nonetype", b"codec", b"recursion", b"object has no", b"`", b"dict", b"str,", b"int,")


RENAMING = {"x-llm-d-model-name-rewrite": "n"}


async def test_bad_bodies_are_left_to_the_endpoints(tmp_path: Path, caplog: Any) -> None:
    one = pods(page())
    async with whole_picker(tmp_path, one, EVERY_PARSER) as picker:
        for path, body in BAD:
            assert await picker.ask(body, path=path) == directed(one[0].host_port, body), body
        assert await picker.outcomes() == {"client-gone": len(BAD)}
        assert await picker.is_idle()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_body_that_is_no_json_is_refused_where_its_model_would_be_replaced(
    tmp_path: Path,
) -> None:
    one = pods(page())
    async with whole_picker(tmp_path, one, EVERY_PARSER) as picker:
        num_refused = 0
        for path, body in BAD:
            first, *_ = await picker.ask(body, RENAMING, path=path)
            if first.WhichOneof("response") != "immediate_response":
                assert path == "/generate" or json.loads(body), body
                continue
            num_refused += 1
            assert first.immediate_response.status.code == 400, body
            error = json.loads(first.immediate_response.body)["error"]
            is_anthropic = path == "/v1/messages"
            kind = "invalid_request_error" if is_anthropic else "BadRequestError"
            assert error["type"] == kind, body
            text = error["message"].lower().encode()
            assert text.startswith(b"the request body cannot be read as json: "), body
            assert not [word for word in PYTHONS if word in text], body
        assert num_refused == 15
        assert await picker.is_idle()


async def test_the_response_of_a_token_count_is_not_read(tmp_path: Path) -> None:
    one = pods(page())
    path, body = "/v1/messages/count_tokens", b"not even JSON"
    async with whole_picker(tmp_path, one, EVERY_PARSER) as picker:
        async with picker.stream() as stream:
            assert await stream.ask(body, path=path) == directed(one[0].host_port, body)
            assert await stream.respond([b'{"input_', b'tokens":7}']) == b'{"input_tokens":7}'
        assert await picker.series("llm_d_epp_request_input_tokens_sum") is None
        stream = GatewayStream(picker.channel)
        modes = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.NONE
        await stream.request_headers(path=path, modes=modes)
        await stream.request_body(body)
        assert await stream.read(9) == directed(one[0].host_port, body)
        assert await stream.call.code() is grpc.StatusCode.OK
        await until(picker.is_idle)
        assert await picker.outcomes() == {"skipped": 2}


@pytest.mark.parametrize("header", ["x-original-path", "x-forwarded-path"])
async def test_a_path_may_stand_in_another_header(tmp_path: Path, header: str) -> None:
    async with whole_picker(tmp_path, pods(page()), EVERY_PARSER) as picker:
        for headers, begins in (({header: "/v1/messages"}, b'{"type": "error"'), ({}, b'{"error"')):
            (said,) = await picker.ask(b"{", RENAMING | headers, path="")
            assert said.immediate_response.body.startswith(begins)
