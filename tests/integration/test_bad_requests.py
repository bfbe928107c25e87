"""A corpus of bad requests over raw sockets: each gets its documented 4xx, and the worker lives."""

import itertools
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.worker.sim_worker import SimWorker, post, read_reply, sim_worker

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = b'{"prompt": "hello", "max_tokens": 2, "ignore_eos": true}'
TURNS = b'"messages": [{"role": "user", "content": "a"}]'
HOST = b"Host: w\r\n"
MIB = 1 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[SimWorker]:
    with sim_worker("--header-timeout", "120", "--body-timeout", "120") as running:
        yield running


@dataclass(frozen=True)
class Bad:
    body: bytes
    words: str
    status: int = 400
    path: str = TEXT
    param: str | None = None


def deep(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b'{"prompt": ' + opening * depth + closing * depth + b"}"


MALFORMED = [
    Bad(b"", "The body is empty"),
    *(Bad(GOOD[:n], "ends too early (byte") for n in range(3, len(GOOD), 3)),
    *(Bad(GOOD + tail, "trailing characters (byte") for tail in (b"x", b"{}", b"\x00", b"]")),
    *(
        Bad(b'{"prompt": "a", "seed": ' + literal + b"}", "(byte 2")
        for literal in b"NaN Infinity -Infinity nan undefined None True +1 .5 01 0x1 1. 1e".split()
    ),
    *(
        Bad(body, "(byte")
        for body in (
            b"{'prompt': 'a'}",
            b'{prompt: "a"}',
            b'{"prompt" "a"}',
            b'{"prompt": "a",}',
            b'{"prompt": ["a",]}',
            b'{"prompt": "a" "max_tokens": 2}',
            b'{"prompt": "a"; }',
            b'{"prompt": "a"} // comment',
            b'{"prompt": "a\nb"}',
            b'{"prompt": "a\x00b"}',
            b'{"prompt": "\\x41"}',
            b'{"prompt": "\\u12"}',
        )
    ),
    Bad(b'/* comment */ {"prompt": "a"}', "(byte 0)"),
    Bad(b"prompt=hello", "(byte 0)"),
    Bad(b"\xff\xfe" + GOOD, "invalid UTF-8"),
    Bad(GOOD.decode().encode("utf-16"), "invalid UTF-8"),
    Bad(b"\x80\x04K*.", "invalid UTF-8"),
    *(
        Bad(b'{"prompt": "' + bad + b'"}', "invalid UTF-8: ")
        for bad in b"\xff \xc0\xaf \xe2\x82 \xed\xa0\x80 \xf4\x90\x80\x80 \x80".split()
    ),
    Bad(b'{"\xff": "a"}', "invalid UTF-8: invalid start byte (byte 2)"),
    *(
        Bad(b'{"prompt": "' + bad + b'"}', "surrogate without its other half (byte 12)")
        for bad in (b"\\ud800", b"\\udc00", b"\\ud800\\ud800", b"\\udc00\\ud800", b"\\uDBFF x")
    ),
]
TOO_MUCH = [
    *(
        Bad(deep(*brackets, depth), "nested deeper than 64 levels")
        for brackets in ((b"[", b"]"), (b'{"a":', b"}"))
        for depth in (65, 1000)
    ),
    Bad(deep(b"[", b"]", 100_000), "65536 objects and arrays"),
    Bad(b"[" * 100_000, "65536 objects and arrays"),
    Bad(b'{"prompt": [' + b"[]," * 70_000 + b"[]]}", "65536 objects and arrays"),
    Bad(b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}", "out of range", param="seed"),
    Bad(b'{"prompt": "a", "seed": 9223372036854775808}', "64 bits", param="seed"),
    Bad(b'{"prompt": "a", "max_tokens": 1e30}', "64 bits", param="max_tokens"),
    Bad(b'{"prompt": "a", "temperature": 1e999}', "out of range", param="temperature"),
    Bad(b'{"prompt": "a", "user": ' + b"1" * 5000 + b"}", "out of range", param="user"),
    Bad(b'{"prompt": [99999999999999999999]}', "Token ids", param="prompt"),
    Bad(b'{"prompt": "' + b"x" * (4 * MIB) + b'"}', "longer than", 413),
]
# Of tools, and of calls in a history.
TOOL = b'{"type": "function", "function": {"name": "%b", "parameters": %b}}'
TOO_MUCH += [
    Bad(b"{" + TURNS + b', "tools": [' + tools + b"]}", words, path=CHAT, param=param)
    for tools, words, param in (
        (TOOL % (b"f", b'{"items":' * 70 + b"{}" + b"}" * 70), "nested deeper than 64", None),
        (b"1", "", "tools.0"),
        (b'{"function": {}}', "", "tools.0.function.name"),
        (b'{"function": {"name": 1}}', "", "tools.0.function.name"),
        (b'{"function": {"name": "f", "parameters": []}}', "", "tools.0.function.parameters"),
        (TOOL % (b"f", b'{"$ref": "#/$defs/f"}'), "--tool-call-parser", None),
    )
]
TOO_MUCH += [
    Bad(b'{"messages": [{"role": "assistant", "tool_calls": ' + calls + b"}]}", "", 400, CHAT)
    for calls in (
        b"1",
        b"[1]",
        b"[{}]",
        b'[{"function": {}}]',
        b'[{"function": {"name": "f", "arguments": [1]}}]',
        b'[{"type": "x", "function": {"name": "f"}}]',
        b"[" + b'{"function": {"name": "f"}},' * 512 + b'{"function": {"name": "f"}}]',
        b'[{"function": {"name": "f", "arguments": "{\\"a\\": [' + b"[]," * 70_000 + b'[]]}"}}]',
    )
]
# Fields of each type, and values that are none.
_NOT = {
    "integer": (b'"1"', b"true", b"1.5", b"[]", b"{}"),
    "number": (b'"1"', b"true", b"[]", b"{}"),
    "boolean": (b'"true"', b"1", b"0", b"[]", b"{}"),
    "string": (b"1", b"true", b"[]", b"{}"),
    "array": (b"1", b"true", b'"a"', b"{}", b"[{}]", b"[null]"),
    "object": (b"1", b"true", b'"a"', b"[]"),
}
_FIELDS = {
    "integer": "max_tokens min_tokens n top_k seed logprobs prompt_logprobs truncate_prompt_tokens"
    " stream_interval priority",
    "number": "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty"
    " length_penalty",
    "boolean": "stream echo ignore_eos include_stop_str_in_output skip_special_tokens"
    " use_beam_search add_special_tokens return_token_ids return_tokens_as_token_ids",
    "string": "model cache_salt request_id truncation_side",
    "array": "stop_token_ids allowed_token_ids bad_words logprob_token_ids",
    "object": "logit_bias stream_options repetition_detection",
}
WRONG_TYPES = [
    Bad(b'{"prompt": "a", "%b": %b}' % (name.encode(), value), "", param=name)
    for kind, names in _FIELDS.items()
    for name, value in itertools.product(names.split(), _NOT[kind])
]
WRONG_TYPES += [
    *(Bad(b'{"prompt": ' + v + b"}", "") for v in (b"null", b"1", b"true", b"{}", b"[true]")),
    *(Bad(body, "") for body in (b"null", b"[]", b'"a"', b"1", b"true", b"[[]]")),
    *(
        Bad(b'{"messages": ' + v + b"}", "", path=CHAT)
        for v in (b"null", b"1", b'"a"', b"{}", b"[1]", b"[null]", b'["a"]', b'[{"role": 1}]')
    ),
    Bad(b"{" + TURNS + b', "top_logprobs": "1"}', "", path=CHAT, param="top_logprobs"),
    Bad(b"{" + TURNS + b', "chat_template_kwargs": {"messages": 1}}', "cannot set", path=CHAT),
    Bad(b'{"messages": [{"role": "king", "content": "a"}]}', "role must be", path=CHAT),
    Bad(b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "", path=CHAT),
]
CORPUS = [*MALFORMED, *TOO_MUCH, *WRONG_TYPES]


def names(error: dict[str, Any], field: str) -> bool:
    param = error["param"]
    if param is None:
        return field in error["message"]
    return bool(re.fullmatch(rf"(?:body\.)?{field}(?:\..+)?", param))


def assert_serves(worker: SimWorker) -> None:
    assert worker.process.poll() is None
    status, body = worker.ask(post(TEXT, GOOD))
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_the_corpus_is_refused_as_documented(worker: SimWorker) -> None:
    before = worker.rss_bytes()
    wrong = []
    for bad in CORPUS:
        status, body = worker.ask(post(bad.path, bad.body))
        error = json.loads(body).get("error", {})
        right = (
            (status, error.get("code")) == (bad.status, bad.status)
            and bad.words in error["message"]
            and (bad.param is None or names(error, bad.param))
            and len(body) < 2000
        )
        if not right:
            wrong.append((bad.body[:80], bad.words, bad.param, status, body[:300]))
    assert not wrong
    assert worker.rss_bytes() - before < 64 * MIB
    assert_serves(worker)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(TEXT, GOOD, "text/plain"), 400),
        (post(TEXT, GOOD, "multipart/form-data; boundary=x"), 400),
        (post("//v1/completions", GOOD), 404),
        (post("/v1/../metrics", GOOD), 404),
        (b"PUT /v1/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"DELETE /v1/models HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"TRACE /metrics HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"get /health HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /health HTTP/3.0\r\n" + HOST + b"\r\n", 400),
        (b"\x00" * 100, 400),
        (b"hello\r\n\r\n", 400),
        (post(TEXT, GOOD).replace(b"Length: ", b"Length: -"), 400),
        (post(TEXT, GOOD).replace(b"Length: ", b"Length: 9999999999999999999999"), 400),
        (post(TEXT, GOOD).replace(b"Length: ", b"Length: 99999999999"), 413),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"X-Long: " + b"a" * (4 * MIB), 431),
    ],
)
def test_bad_http_is_refused(worker: SimWorker, request_bytes: bytes, status: int) -> None:
    before = worker.rss_bytes()
    got, body = worker.ask(request_bytes)
    assert (got, json.loads(body)["error"]["code"]) == (status, status)
    assert worker.rss_bytes() - before < 16 * MIB
    assert_serves(worker)


def test_a_gigabyte_in_chunks_is_cut_off(worker: SimWorker) -> None:
    before = worker.rss_bytes()
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * MIB + b"\r\n"
    sent = 0
    with worker.connect() as connection:
        connection.sendall(head)
        connection.settimeout(0.0)
        with suppress(ConnectionError):
            while sent < 1024 * MIB:
                piece = chunk[sent % len(chunk) :]
                try:
                    sent += connection.send(piece)
                except BlockingIOError:
                    if _readable(connection):
                        break
                if sent % (8 * MIB) < len(piece) and _readable(connection):
                    break
        connection.settimeout(120)
        status, body = read_reply(connection)
    assert (status, json.loads(body)["error"]["code"]) == (413, 413)
    assert sent < 256 * MIB
    assert worker.rss_bytes() - before < 32 * MIB
    assert_serves(worker)


def _readable(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_running_out_of_files_is_survived() -> None:
    with sim_worker(max_files=104) as worker:
        old = [worker.connect() for _ in range(40)]
        for connection in old:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            assert read_reply(connection)[0] == 200
        for _ in range(200):
            with worker.connect() as newcomer:
                assert read_reply(newcomer)[0] == 503
        old[0].sendall(post(TEXT, GOOD))
        assert read_reply(old[0])[0] == 200
        for connection in old:
            connection.close()
        while worker.ask(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")[0] != 200:
            pass
