"""Workers fail in every way behind the front: the client has one whole answer, or an error."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from base.forwarding import new_session
from fleet.command_lines import parser_of
from fleet.proxy.forward import runner_of
from fleet.proxy.front import Front, FrontOptions, Marks
from fleet.run.process import LONGEST_DELAY_SECONDS
from tests.support.web_server import Handler, Server, listening

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Zwölf"}], "stream": True}
STATE = {"id": "chatcmpl-1", "created": 7, "seed": 3, "prompt": 9}
HEADERS = {"Content-Type": "text/event-stream", "x-pointsman-resume": json.dumps(STATE)}
TOKENS = [*"aö🙂!".encode()]
DONE = b"data: [DONE]\n\n"
Break = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def writes(token_ids: list[int] | None) -> list[bytes]:
    """The bytes after these tokens: the text of a character comes with its last byte."""
    begun = len(token_ids or ())
    decoded = bytes(TOKENS[:begun]).decode(errors="ignore")
    found = [event(role="assistant") + b": resume []\n\n"] if token_ids is None else []
    for number in range(begun, len(TOKENS)):
        text = bytes(TOKENS[: number + 1]).decode(errors="ignore")
        found.append(event(text=text[len(decoded) :]) + b": resume [%d]\n\n" % TOKENS[number])
        decoded = text
    return [*found, event(finish="stop") + event(usage=len(TOKENS)) + DONE]


WHOLE = b"".join(text for w in writes(None) for text in [w.split(b": resume")[0]])
SOME = len(b"".join(writes(None)[:3]))  # bytes of a stream's first three writes
EVENTS, JSON = "text/event-stream", "application/json"


async def fall(request: web.Request, _: web.StreamResponse) -> None:
    assert request.transport is not None
    request.transport.abort()


async def end_early(_: web.Request, response: web.StreamResponse) -> None:
    await response.write_eof()


def fail(code: int) -> Break:
    async def write(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(event(error={"message": "no", "code": code}))
        assert request.transport is not None
        request.transport.close()

    return write


async def stall(_: web.Request, __: web.StreamResponse) -> None:
    await asyncio.Event().wait()


async def begun(request: web.Request, text: bytes, headers: Any = HEADERS) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await response.write(text)
    return response


def of(kind: str) -> dict[str, str]:
    return {"Content-Type": kind}


class Worker:
    """Streams the answer; its n-th request breaks after a number of bytes, in its way."""

    def __init__(self, *breaks: tuple[int, Break]) -> None:
        self.breaks = list(breaks)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        resume = json.loads(await request.read())["resume"]
        if resume:
            assert {name: resume[name] for name in STATE} == STATE
        text = b"".join(writes(resume.get("token_ids")))
        if not self.breaks:
            return await begun(request, text)
        size, how = self.breaks.pop(0)
        response = await begun(request, text[:size])
        await how(request, response)
        return response


class Broken(Worker):
    """Breaks the stream once, and then refuses all requests."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__((SOME, fall))
        self.status, self.text = status, text

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.breaks:
            return await super().__call__(request)
        return web.Response(status=self.status, text=self.text)


class House:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.worker = Server(Worker())

    async def start(self, **options: Any) -> House:
        await self._stack.enter_async_context(self.worker.serving())
        flags = ["--gateway", f"http://{self.worker.address}", "--drain-timeout", "1"]
        given = vars(parser_of("front").parse_args(flags))
        session = await self._stack.enter_async_context(new_session())
        self.front = Front(FrontOptions(**{**given, **options}), session)
        runner = runner_of(self.front.handle, 1.0)
        self.url = f"http://127.0.0.1:{await listening(runner)}"
        self._stack.push_async_callback(runner.cleanup)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def ask(
        self, body: Any = ASKED, path: str = CHAT, **headers: str
    ) -> tuple[int, bytes, bool]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        found = b""
        async with self.client.post(self.url + path, data=data, headers=headers) as answer:
            assert "x-pointsman-resume" not in answer.headers
            try:
                async for chunk in answer.content.iter_any():
                    found += chunk
            except aiohttp.ClientPayloadError:
                return answer.status, found, False
            return answer.status, found, True


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(stack)


async def test_a_stream_continues_wherever_it_breaks(house: House) -> None:
    """The stream breaks after every byte, in every way; the client sees one, without marks."""
    await house.start()
    stream = b"".join(writes(None))
    workers = [
        Worker((size, (fall, end_early, fail(503))[size % 3])) for size in range(len(stream))
    ]
    workers.append(Worker((len(stream), fall)))
    house.worker.behave = lambda request: workers[int(request.headers["x-number"])](request)
    async with asyncio.TaskGroup() as group:
        for number in range(len(workers)):
            group.create_task(whole_answer(house, number))
    assert not any(worker.breaks for worker in workers)


async def whole_answer(house: House, number: int) -> None:
    assert await house.ask(**{"x-number": str(number)}) == (200, WHOLE, True)


async def test_a_client_that_has_comments_alone_has_nothing_yet(house: House) -> None:
    """A worker died over a long prompt: the stream starts again, under its id."""
    await house.start()
    worker = Worker()

    async def behave(request: web.Request) -> web.StreamResponse:
        if len(house.worker.asked) > 1:
            return await worker(request)
        response = await begun(request, b": keep-alive\n\n")
        await resumed.wait()
        await fall(request, response)
        return response

    resumed = asyncio.Event()
    house.worker.behave = behave
    async with house.client.post(house.url + CHAT, json=ASKED) as answer:
        assert await answer.content.readany() == b": keep-alive\n\n"
        resumed.set()
        assert await answer.read() == WHOLE
    (_, second) = (json.loads(asked[3])["resume"] for asked in house.worker.asked)
    assert second == STATE


async def test_a_stream_with_progress_may_break_any_number_of_times(house: House) -> None:
    await house.start(attempts=2)
    size = len(b"".join(writes(None)[:2]))
    house.worker.behave = Worker(*[(size, fall)] * (len(TOKENS) - 1))
    assert await house.ask() == (200, WHOLE, True)
    assert len(house.worker.asked) > 3


async def test_a_stream_without_progress_is_given_up(house: House) -> None:
    """The stream ends irregularly, so that it is not taken for the whole answer."""
    await house.start(attempts=3)
    house.worker.behave = Worker((SOME, fall), *[(0, fall)] * 9)
    status, text, is_whole = await house.ask()
    assert (status, is_whole) == (200, False)
    begun, _, last = text.removesuffix(b"\n\n").rpartition(b"\n\n")
    assert WHOLE.startswith(begun)
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert len(house.worker.asked) == 3


async def test_a_silent_worker_counts_as_dead(house: House) -> None:
    await house.start(stall_timeout=0.05, attempts=1000)  # any of them may be slow
    house.worker.behave = Worker((SOME, stall))
    assert await house.ask() == (200, WHOLE, True)


async def test_no_worker_for_a_moment(house: House) -> None:
    await house.start()
    worker = Worker((SOME, fall))
    refusals = [
        lambda: web.Response(status=503, text="no healthy upstream"),
        lambda: web.json_response({"error": {"code": 503}}, status=503),
        lambda: web.json_response({"error": {"code": 429}}, status=429),
        lambda: web.Response(text="data: [DONE]\n\n", headers=of(EVENTS)),
    ]

    async def behave(request: web.Request) -> web.StreamResponse:
        number = len(house.worker.asked) - 2
        return refusals[number]() if 0 <= number < len(refusals) else await worker(request)

    house.worker.behave = behave
    assert await house.ask() == (200, WHOLE, True)
    assert len(house.worker.asked) == len(refusals) + 2


async def test_patience_has_an_end(house: House) -> None:
    await house.start(patience=0.05)
    house.worker.behave = Broken(503, "no healthy upstream")
    _, text, is_whole = await house.ask()
    assert not is_whole
    assert b"no healthy upstream" in text


def test_patience_outlasts_the_pause_between_two_starts() -> None:
    """If all workers of `pointsman up` are killed again and again, one of them returns."""
    assert parser_of("front").parse_args([]).patience > LONGEST_DELAY_SECONDS


def refusing(status: int, text: str, kind: str = "text/plain") -> Handler:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type=kind)

    return refuse


async def test_errors_of_a_worker_are_its_answer(house: House) -> None:
    await house.start()
    house.worker.behave = Worker((SOME, fail(500)))
    _, text, is_whole = await house.ask()
    assert not is_whole
    assert text.endswith(event(error={"message": "no", "code": 500}))
    for status in (400, 401, 404, 429, 500, 503):
        said = json.dumps({"error": {"code": status}})
        house.worker.behave = refusing(status, said, JSON)
        assert await house.ask() == (status, said.encode(), True)
    assert len(house.worker.asked) == 7


async def test_a_refused_continuation_ends_the_answer(house: House) -> None:
    await house.start()
    house.worker.behave = Broken(400, '{"error": {"message": "another prompt"}}')
    _, text, is_whole = await house.ask()
    assert not is_whole
    assert b"another prompt" in text
    assert len(house.worker.asked) == 2


ERROR = {"error": {"message": "upstream connect error", "code": 503}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "signature",
    [None, {"x-pointsman-local-reply": "envoy"}, {"x-llm-d-request-dropped-reason": "rejected"}],
)
async def test_before_an_answer_another_worker_is_asked(
    house: House, stream: bool, signature: dict[str, str] | None
) -> None:
    """The gateway, Envoy or the picker says that there is no worker, or a worker died."""
    await house.start()
    whole = json.dumps({"text": "x" * 9000}).encode()

    async def behave(request: web.Request) -> web.StreamResponse:
        number = len(house.worker.asked)
        if number == 1:
            if signature is None:
                return web.Response(status=503, text="upstream connect error")
            return web.json_response(ERROR, status=503, headers=signature)
        if stream:
            return await Worker()(request)
        response = await begun(request, whole[: 8000 if number == 2 else None], of(JSON))
        if number == 2:
            await fall(request, response)
        return response

    house.worker.behave = behave
    found = await house.ask({**ASKED, "stream": stream})
    assert found == (200, WHOLE if stream else whole, True)
    bodies = [json.loads(asked[3]) for asked in house.worker.asked]
    assert len(bodies) == (2 if stream else 3)
    assert all(body == ({**ASKED, "resume": {}} if stream else bodies[0]) for body in bodies)


async def test_without_any_worker_there_is_a_503(house: House) -> None:
    await house.start(patience=0.05)
    house.worker.behave = refusing(502, "no healthy upstream")
    status, text, _ = await house.ask()
    assert status == 503
    assert "no healthy upstream" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "message"),
    [(CHAT, "no worker answers: the gateway does not answer"), ("/passed/on", "no worker answers")],
)
async def test_without_a_gateway_there_is_a_503_without_its_address(
    house: House, path: str, message: str
) -> None:
    await house.start(patience=0.05, gateway="http://127.0.0.1:1")
    status, text, _ = await house.ask(path=path)
    error = {"type": "ServiceUnavailableError", "param": None, "code": 503}
    assert (status, json.loads(text)) == (503, {"error": {"message": message, **error}})


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT, {**ASKED, "resume": {}}, {}),
        (CHAT, b"{not json", {}),
        (CHAT, gzip.compress(json.dumps(ASKED).encode(), mtime=0), {"content-encoding": "gzip"}),
        ("/v1/responses", {"input": "a", "stream": True}, {}),
        ("/v1/tokenize", {"prompt": "a", "stream": True}, {}),
        (CHAT, {**ASKED, "padding": "x" * (9 << 20)}, {}),
    ],
)
async def test_an_unmarked_answer_is_passed_on(
    house: House, path: str, body: Any, headers: dict[str, str]
) -> None:
    await house.start()

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await begun(request, b"data: 1\n\n", of(EVENTS))
        await fall(request, response) if path == CHAT else await response.write_eof()
        return response

    house.worker.behave = behave
    status, _, is_whole = await house.ask(body, path, **headers)
    assert status == 200
    assert is_whole is (path != CHAT)
    ((_, asked_path, _, data),) = house.worker.asked
    assert asked_path == path
    assert data == (body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize("beyond", [0, 1])
async def test_a_body_is_held_up_to_its_limit(
    house: House, beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.proxy.front.MAX_HELD_BYTES", len(json.dumps(ASKED)) - beyond)
    await house.start()
    house.worker.behave = Worker((SOME, fall))

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await begun(request, b"", of(EVENTS))
        await fall(request, response)
        return response

    if beyond:
        house.worker.behave = behave
    _, text, is_whole = await house.ask()
    assert (text, is_whole) == ((b"", False) if beyond else (WHOLE, True))
    assert len(house.worker.asked) == (1 if beyond else 2)


@pytest.mark.parametrize("beyond", [0, 1])
async def test_text_without_a_mark_is_held_up_to_a_limit(
    house: House, beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = event(text="x" * 2000)
    monkeypatch.setattr("fleet.proxy.front.MAX_HELD_BYTES", len(padding) - beyond)
    await house.start()
    worker = Worker()

    async def behave(request: web.Request) -> web.StreamResponse:
        if len(house.worker.asked) > 1:
            return await worker(request)
        response = await begun(request, padding)
        await end_early(request, response)
        return response

    house.worker.behave = behave
    status, text, is_whole = await house.ask()
    assert len(house.worker.asked) == (1 if beyond else 2)
    assert (status, is_whole) == ((503, True) if beyond else (200, True))
    assert (b"bytes have no mark" in text) is bool(beyond)


@pytest.mark.parametrize("beyond", [0, 1])
async def test_an_answer_is_held_up_to_its_limit(
    house: House, beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = b"x" * (1000 + beyond)
    monkeypatch.setattr("fleet.proxy.front.MAX_HELD_BYTES", 1000)
    await house.start()

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await begun(request, half, of(JSON))
        if len(house.worker.asked) == 1:
            await fall(request, response)
        return response

    house.worker.behave = behave
    found = await house.ask({"messages": []})
    assert found == (200, half, not beyond)
    assert len(house.worker.asked) == (1 if beyond else 2)


async def test_streams_without_marks_are_unchanged(house: House) -> None:
    """A worker that does not know the field is passed on by chunks, and cut where it breaks."""
    await house.start()
    may_go_on = asyncio.Event()

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await begun(request, b"data: 1\n\n", of(EVENTS))
        await may_go_on.wait()
        await fall(request, response)
        return response

    house.worker.behave = behave
    async with house.client.post(house.url + CHAT, json=ASKED) as answer:
        assert await answer.content.readany() == b"data: 1\n\n"
        may_go_on.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.readany()
    assert len(house.worker.asked) == 1


async def test_a_client_disconnect_ends_the_request(house: House) -> None:
    await house.start()
    house.worker.behave = Worker((SOME, stall))
    async with house.client.post(house.url + CHAT, json=ASKED) as answer:
        await answer.content.readany()
        answer.close()
    await asyncio.wait_for(house.worker.left.wait(), 60)


async def test_a_break_during_the_drain_is_an_end(house: House) -> None:
    await house.start()
    house.front.drain()
    house.worker.behave = Worker((SOME, fall))
    _, text, is_whole = await house.ask()
    assert not is_whole
    assert b'"code":503' in text
    assert len(house.worker.asked) == 1


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_marks_are_found_however_they_are_cut(size: int) -> None:
    marks = Marks()
    stream = b": keep-alive\n\n" + b"".join(writes(None))
    found = [marks.take(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert b"".join(found) == b": keep-alive\n\n" + WHOLE
    assert marks.token_ids == TOKENS
    assert marks.is_complete
    assert not marks.held
