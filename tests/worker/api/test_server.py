"""Behaviour that needs a socket or belongs to every route: cuts, disconnects, limits, keys."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from worker.errors import EngineDeadError
from worker.types import EngineStats, FinishReason

TEXT = "/v1/completions"
STREAM = {"prompt": "a", "stream": True}


@pytest.mark.parametrize("failure", ["dies", "error"])
async def test_a_stream_that_fails_is_cut_after_the_error(bench: Any, failure: str) -> None:
    gives_up = bench.say([], FinishReason.ERROR, error="no blocks")
    step = EngineDeadError("gone") if failure == "dies" else gives_up
    bench.engine.steps = [bench.say("x"), step]
    chunks: list[bytes] = []

    async def read(response: httpx.Response) -> None:
        async for chunk in response.aiter_raw():
            chunks[len(chunks) :] = [chunk]  # keeps what came before the cut

    async with (
        bench.listening(bench.api()) as url,
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", url + TEXT, json=STREAM) as response,
    ):
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            await read(response)
    received = b"".join(chunks)
    assert response.status_code == 200
    last = received.decode().rstrip().rsplit("\n\n", 1)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] in (500, 503)
    assert b"[DONE]" not in received


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(bench: Any, stream: bool) -> None:
    bench.engine.steps = [bench.say("x"), asyncio.Event()]
    api = bench.api()
    async with bench.listening(api) as url, httpx.AsyncClient(timeout=60) as client:
        call = asyncio.ensure_future(client.post(url + TEXT, json={**STREAM, "stream": stream}))
        await bench.engine.saw_request.wait()
        call.cancel()
        await asyncio.wait_for(bench.engine.saw_abort.wait(), 60)
        assert await api.admission.wait_idle(60)
    assert bench.engine.aborted == [bench.engine.requests[0].request_id]
    assert 'finished_reason="abort"} 1\n' in api.page()


async def test_nothing_is_sent_before_the_first_token(bench: Any) -> None:
    """A proxy may retry until the headers are sent."""
    bench.engine.steps = [go := asyncio.Event(), *bench.engine.steps]
    async with bench.listening(bench.api()) as url, httpx.AsyncClient(timeout=60) as client:

        async def first_byte() -> int:
            async with client.stream("POST", url + TEXT, json=STREAM) as response:
                await response.aread()
                return response.status_code

        call = asyncio.ensure_future(first_byte())
        await bench.engine.saw_request.wait()
        assert (await client.get(url + "/health")).status_code == 200
        assert not call.done()
        go.set()
        assert await call == 200


async def test_the_openai_client_reads_answers(bench: Any) -> None:
    async with (
        bench.listening(bench.api()) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client,
    ):
        messages: Any = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        assert whole.choices[0].message.content == "hi"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        parts = []
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        ):
            parts += [choice.delta.content for choice in chunk.choices]
        assert "".join(p or "" for p in parts) == "hi"
        assert chunk.usage is not None
        text = await client.completions.create(model="tiny", prompt=["a", "b"])
        assert [c.text for c in text.choices] == ["hi", "hi"]
        assert [m.id async for m in client.models.list()] == ["tiny", "alias"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="not supported yet"):
            await client.chat.completions.create(
                model="tiny", messages=messages, modalities=["audio"]
            )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", TEXT, 405), ("POST", "/metrics", 405), ("GET", "/v1/", 404)],
)
async def test_routes_are_exact(bench: Any, method: str, path: str, status: int) -> None:
    async with bench.client() as client:
        response = await client.request(method, path)
    assert response.status_code == response.json()["error"]["code"] == status
    assert ("allow" in response.headers) is (status == 405)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models/", 200), ("/health/", 200), ("/v1/models//", 404)]
)
async def test_a_slash_at_the_end_of_a_path_does_not_count(
    bench: Any, path: str, status: int
) -> None:
    async with bench.client(api_keys=["k"]) as client:
        assert (await client.get(path, headers={"x-api-key": "k"})).status_code == status
        guarded = 401 if path.startswith("/v1") else status
        assert (await client.get(path)).status_code == guarded


async def test_bodies_are_bounded_and_json(bench: Any) -> None:
    async def trickle() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with bench.client(max_body_bytes=1000) as client:
        announced = await client.post(TEXT, json={"prompt": "x" * 2000})
        long = await client.post(TEXT, json={"prompt": "x" * 300_000})
        unannounced = await client.post(
            TEXT, content=trickle(), headers={"content-type": "application/json"}
        )
        form = await client.post(TEXT, data={"prompt": "a"})
        plain = await client.post(TEXT, content=b'{"prompt":"a"}')
    answers = (announced, long, unannounced, form, plain)
    assert [r.status_code for r in answers] == [413, 413, 413, 400, 200]
    # A short body is discarded, and the connection continues.
    closes = [r.headers.get("connection") == "close" for r in answers]
    assert closes == [False, True, True, False, False]


async def test_headers_are_bounded(bench: Any) -> None:
    async with bench.client() as client:
        many = await client.get("/health", headers={f"x-{n}": "1" for n in range(120)})
        long = await client.get("/health", headers={"x-long": "x" * 70_000})
    assert (many.status_code, long.status_code) == (431, 431)


KEY = {"authorization": "Bearer two"}


async def test_keys_guard_routes_that_cost_or_reveal(bench: Any) -> None:
    wrong: list[str | bytes] = ["Bearer three", "Bearer tw", "Basic two", "two", b"Bearer \xff"]
    given = [{}, *({"authorization": value} for value in wrong), KEY]
    guarded_routes = (
        *(("GET", path) for path in ("/v1/nothing", "/v2/nothing")),
        *(("POST", path) for path in (TEXT, TEXT + "/render", "/invocations")),
        ("POST", "/inference/v1/generate"),
    )
    async with bench.client(api_keys=["one", "two"]) as client:
        statuses = [
            (await client.get("/v1/models", headers=headers)).status_code
            for headers in (*given, {"authorization": "bearer one"})
        ]
        guarded = [await client.request(method, path) for method, path in guarded_routes]
        refused = await client.post(TEXT, json={"prompt": "a"})
        opened = [
            (await client.get("/metrics")).status_code,
            (await client.get("/health")).status_code,
            (await client.post("/tokenize", json={"prompt": "a"})).status_code,
            (await client.options(TEXT)).status_code,
            (await client.post(TEXT, json={"prompt": "a"}, headers=KEY)).status_code,
        ]
    assert statuses == [401, 401, 401, 401, 401, 401, 200, 200]
    assert {r.status_code for r in guarded} == {401}
    assert opened == [200] * 5
    assert refused.json() == {"error": "Unauthorized"}
    assert refused.headers["www-authenticate"] == "Bearer"


async def test_options_lists_the_methods(bench: Any) -> None:
    async with bench.client() as client:
        known, unknown = await client.options("/ping"), await client.options("/nope")
    assert (known.status_code, known.headers["allow"]) == (200, "GET, POST, OPTIONS")
    assert unknown.status_code == 404


@pytest.mark.parametrize("given", ["mine", "x" * 129, "\xe4", None])
async def test_request_ids_are_used_and_echoed(bench: Any, given: str | None) -> None:
    headers = [] if given is None else [(b"x-request-id", given.encode("latin-1"))]
    for enabled in (False, True):
        async with bench.client(enable_request_id_headers=enabled) as client:
            answer = await client.post(TEXT, json={"prompt": "a"}, headers=headers)
            health = await client.get("/health", headers=headers)
        echoed = answer.headers.get("x-request-id")
        assert (echoed is not None) is enabled
        assert ("x-request-id" in health.headers) is enabled
        own = answer.json()["id"].removeprefix("cmpl-")
        if given == "mine":
            assert own == "mine"
        if enabled:
            assert own == echoed


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "chat.completion"),
        ({"prompt": "a"}, "text_completion"),
        ({"token_ids": [1]}, None),
    ],
)
async def test_invocations_go_by_the_body(bench: Any, body: dict[str, Any], kind: Any) -> None:
    assert (await bench.answer("/invocations", body)).get("object") == kind
    neither = await bench.post("/invocations", {"input": "a"})
    assert (neither.status_code, neither.json()["error"]["param"]) == (400, "body.messages")


async def test_exchanges_are_counted_by_route(bench: Any) -> None:
    api = bench.api()
    async with bench.client_of(api) as client:
        await client.post(TEXT, json={"prompt": "a"})
        await client.post(TEXT, content=b"x")
        await client.get("/v1/nothing")
        for path in ("/metrics", "/health", "/load", "/ping", "/version"):
            await client.get(path)
    page = api.page()
    counts = [line for line in page.splitlines() if line.startswith("http_requests_total{")]
    assert sorted(counts) == [
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1',
        'http_requests_total{handler="none",method="GET",status="4xx"} 1',
    ]
    assert 'http_request_size_bytes_sum{handler="/v1/completions"} 15\n' in page


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (
            "TEXT",
            "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0",
        ),
        (
            "json",
            'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}',
        ),
        ("xml", None),
    ],
)
async def test_load_comes_in_a_header_when_asked_for(
    bench: Any, form: str, value: str | None
) -> None:
    bench.engine.stats = EngineStats(num_waiting=3, kv_cache_usage=0.25)
    headers = {"endpoint-load-metrics-format": form}
    async with bench.client() as client:
        response = await client.post(TEXT, json={"prompt": "a"}, headers=headers)
    assert response.headers.get("endpoint-load-metrics") == value


async def test_an_unexpected_error_is_counted_and_reported(bench: Any) -> None:
    bench.engine.steps = [KeyError("secret")]
    api = bench.api()
    async with bench.client_of(api) as client:
        response = await client.post(TEXT, json={"prompt": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert 'where="http"} 1\n' in api.page()


HELLO = {"role": "user", "content": "hi"}
UNKNOWN = {"prompt": "a", "stream_options": {"zz": 1}, "stream": True, "nope": 1, 'a"\n': 2}


async def test_unknown_fields_are_ignored_with_a_warning(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench.client() as client:
        streamed = await client.post(TEXT, json=UNKNOWN)
        bench.engine.steps = [bench.say("x", FinishReason.LENGTH)]
        plain = await client.post(TEXT, json={"prompt": "a", "nope": 2})
        known = await client.post(TEXT, json={"prompt": "a"})
    warning = '299 - "ignored unknown fields: stream_options.zz, nope, a??"'
    assert (streamed.status_code, streamed.headers["warning"]) == (200, warning)
    assert plain.headers["warning"] == '299 - "ignored unknown fields: nope"'
    assert (known.status_code, "warning" in known.headers) == (200, False)
    assert len(bench.engine.requests) == 3
    lines = [one.getMessage() for one in caplog.records if "not part of this API" in one.message]
    assert lines == [
        "/v1/completions: ignored fields that are not part of this API: a??, nope,"
        " stream_options.zz (each is logged once; --strict-fields refuses them)"
    ]


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/chat/completions", {"messages": [{**HELLO, "x": 1}], "y": 1}, "messages[0].x, y"),
        ("/v1/responses", {"input": [{**HELLO, "x": 1}]}, "input[0].x"),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 1, "x": 1}, "x"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"x": 1}},
            "sampling_params.x",
        ),
        ("/invocations", {"prompt": "a", "x": 1}, "x"),
        ("/generate", {"text": "a", "x": 1}, "x"),
        ("/v1/completions/render", {"prompt": "a", "x": 1, "return_token_offsets": True}, "x"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/abort_requests", {"request_ids": [], "x": 1}, "x"),
    ],
)
async def test_every_route_ignores_unknown_fields(
    bench: Any, path: str, body: dict[str, Any], ignored: str
) -> None:
    response = await bench.post(path, body)
    warning = f'299 - "ignored unknown fields: {ignored}"'
    assert (response.status_code, response.headers["warning"]) == (200, warning), response.text


CHAT, LABELS = "/v1/chat/completions", {"metadata": {"a": "b"}, "user": "me"}
MESSAGE: dict[str, Any] = {"messages": [HELLO], "max_tokens": 1}
HINTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [HELLO], **LABELS, "verbosity": "low"}, "metadata, user, verbosity"),
    (CHAT, {"messages": [HELLO], "store": True, "prediction": {"type": "content"}}, "store, pre"),
    (CHAT, {"messages": [HELLO], "service_tier": "flex", "safety_identifier": "x"}, "service_tier"),
    (TEXT, {"prompt": "a", "prompt_cache_key": "k", "user": "me"}, "prompt_cache_key, user"),
    ("/v1/completions/render", {"prompt": "a", "user": "me"}, "user"),
    (CHAT + "/batch", {"messages": [[HELLO]], **LABELS}, "metadata, user"),
    ("/v1/responses", {"input": "a", "prompt_cache_key": "k", "store": True}, "prompt_cache_k"),
    (
        "/v1/responses",
        {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto"},
        "reasoning.summary, truncation",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"skip_reading_prefix_cache": True}},
        "sampling_params.skip_reading_prefix_cache",
    ),
    ("/v1/responses", {"input": "a", "max_tool_calls": 3, "service_tier": "priority"}, "max_tool"),
    ("/v1/messages", {**MESSAGE, "metadata": {"user_id": "x"}, "speed": "fast"}, "metadata, speed"),
    (
        "/v1/messages",
        {
            **MESSAGE,
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        "context_management, thinking.budget_tokens",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [HELLO], "output_config": {"task_budget": {"type": "tokens"}}},
        "output_config.task_budget",
    ),
    ("/generate", {"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_para"),
]


@pytest.mark.parametrize(("path", "body", "ignored"), HINTS)
@pytest.mark.parametrize("strict", [False, True])
async def test_hints_are_ignored_with_a_warning(
    bench: Any, path: str, body: dict[str, Any], ignored: str, strict: bool
) -> None:
    response = await bench.post(path, body, strict_fields=strict)
    assert response.status_code == 200, response.text
    warning = response.headers["warning"]
    assert warning.startswith(f'299 - "ignored fields without effect: {ignored}')


async def test_the_log_has_each_hint_once(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with bench.client() as client:
        for _ in range(2):
            response = await client.post(TEXT, json={"prompt": "a", "nope": 1, "user": "me"})
    assert response.headers.get_list("warning") == [
        '299 - "ignored unknown fields: nope"',
        '299 - "ignored fields without effect: user"',
    ]
    lines = [one.getMessage() for one in caplog.records if "no effect" in one.message]
    assert lines == [f"{TEXT}: ignored fields that have no effect here: user (each is logged once)"]


async def test_a_warning_of_many_fields_has_a_bound(bench: Any) -> None:
    response = await bench.post(TEXT, {"prompt": "a"} | {f"{n}" * 300: n for n in range(10)})
    warning = response.headers["warning"]
    assert warning.endswith('and 2 more"')
    assert len(warning) < 1000


@pytest.mark.parametrize(
    ("strict", "body", "param"),
    [
        (True, {"nope": 1}, "body.nope"),
        (True, {"stream_options": {"zz": 1}}, "body.stream_options.zz"),
        (False, {"nope": 1, "best_of": 2}, "best_of"),
        (False, {"nope": 1, "temperature": 9}, "temperature"),
    ],
)
async def test_some_bodies_are_refused_in_any_mode(
    bench: Any, strict: bool, body: dict[str, Any], param: str
) -> None:
    response = await bench.post(TEXT, {"prompt": "a", **body}, strict_fields=strict)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert bench.engine.requests == []
