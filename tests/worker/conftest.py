"""A scripted engine, and the API served over it: in process (ASGI) or on a real socket."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from worker.api.generate.adapters import ServedAdapters
from worker.api.generate.admission import Admission
from worker.api.generate.engine import OutputStream
from worker.api.generate.text import ModelText
from worker.api.http.connection import protocol_of
from worker.api.openai.checks import RequestChecks
from worker.api.schema.params import ModelLimits
from worker.api.server import WorkerApi
from worker.config import ApiConfig, EngineConfig
from worker.engine.messages import AddRequest, Command, CommandReply, RequestOutput, Vocabulary
from worker.engine.sequences.grammar import GrammarCompiler
from worker.metrics.page import WorkerMetrics
from worker.sim import tokenizer as sim
from worker.tokenizer.chat import ChatTemplate
from worker.types import EngineStats, FinishReason, TokenLogprobs

Step = RequestOutput | Exception | asyncio.Event


def output(
    token_ids: Sequence[int] | str,
    finish: FinishReason | None = None,
    *,
    stop_token: int | None = None,
    error: str | None = None,
    cached: int = 0,
    logprobs: Sequence[TokenLogprobs] = (),
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> RequestOutput:
    """Return an engine output; the bytes of `text` are ids of the simulator's tokenizer."""
    ids = list(token_ids.encode()) if isinstance(token_ids, str) else list(token_ids)
    return RequestOutput(
        "",
        ids,
        finish,
        stop_token_id=stop_token,
        num_cached_tokens=cached,
        scheduled_seconds=1.0,
        first_token_seconds=2.0,
        last_token_seconds=3.0,
        error=error,
        logprobs=list(logprobs),
        prompt_logprobs=list(prompt_logprobs),
    )


def logprob(
    token_id: int | str, *others: tuple[int | str, float], own: float = -0.5
) -> TokenLogprobs:
    pairs = [(token_id, own), *others]
    ids = tuple(ord(i) if isinstance(i, str) else i for i, _ in pairs)
    return TokenLogprobs(ids, tuple(p for _, p in pairs), 1)


@dataclass
class ScriptedEngine:
    """Plays the same steps for every sequence: outputs, errors to raise, events to wait for.
    `script` gives the steps of a request's n-th branch instead.
    """

    steps: list[Step] = field(default_factory=list)
    script: Callable[[AddRequest, int], list[Step]] | None = None
    is_alive: bool = True
    is_stalled: bool = False
    stats: EngineStats = field(default_factory=EngineStats)
    requests: list[AddRequest] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    reply: CommandReply = field(default_factory=lambda: CommandReply(0))
    aborted: list[str] = field(default_factory=list)
    handed_over: list[str] = field(default_factory=list)
    saw_abort: asyncio.Event = field(default_factory=asyncio.Event)
    saw_request: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_waiting_reported(self) -> int:
        return self.stats.num_waiting

    @property
    def is_progressing(self) -> bool:
        return self.is_alive and not self.is_stalled

    def open(self, request: AddRequest) -> tuple[OutputStream, ...]:
        self.requests.append(request)
        self.saw_request.set()
        ids = [request.request_id, *request.branch_ids]
        return tuple(
            ScriptedStream(self, i, iter(self._steps(request, n))) for n, i in enumerate(ids)
        )

    def _steps(self, request: AddRequest, branch: int) -> list[Step]:
        return self.steps if self.script is None else self.script(request, branch)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.saw_abort.set()

    def hand_over(self, request_id: str) -> None:
        self.handed_over.append(request_id)

    async def run(self, command: Command) -> CommandReply:
        self.commands.append(command)
        return self.reply


@dataclass
class ScriptedStream:
    """Plays steps to one consumer; closed before the last output, it counts as aborted."""

    engine: ScriptedEngine
    request_id: str
    steps: Iterator[Step]
    over: bool = False

    async def next(self) -> RequestOutput:
        for step in self.steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                self.over = step.finish_reason is not None
                return msgspec.structs.replace(step, request_id=self.request_id)
        await asyncio.Event().wait()
        raise AssertionError

    def close(self) -> None:
        if not self.over:
            self.over = True
            self.engine.aborted.append(self.request_id)
            self.engine.saw_abort.set()


@dataclass
class Api:
    app: WorkerApi
    config: ApiConfig
    engine: ScriptedEngine
    admission: Admission
    metrics: WorkerMetrics

    def page(self) -> str:
        return self.metrics.render(self.engine.stats, 0.0).decode()


class WatchedTokenizer(sim.SimTokenizer):
    """Counts calls on the event loop's thread and on others."""

    def __init__(self) -> None:
        self.on_loop: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()
        self._loop_thread = threading.get_ident()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in ("encode", "encode_with_offsets", "decode", "token_bytes", "token_text"):
            return value

        def watched(*args: Any, **named: Any) -> Any:
            on_loop = threading.get_ident() == self._loop_thread
            (self.on_loop if on_loop else self.elsewhere)[name] += 1
            return value(*args, **named)

        return watched


@cache
def sim_grammars() -> GrammarCompiler:
    """All tests share it: its threads end with the process."""
    tokenizer = sim.SimTokenizer()
    spelled = [tokenizer.token_bytes(i) for i in range(sim.VOCAB_SIZE)]
    ends = [sim.IM_END_ID, sim.IM_START_ID]
    return GrammarCompiler(Vocabulary(spelled, ends, ends))


def build(
    engine: ScriptedEngine,
    tokenizer: sim.SimTokenizer | None = None,
    template_source: str = sim.CHAT_TEMPLATE,
    **settings: object,
) -> Api:
    config = msgspec.convert(
        {
            "served_model_names": ["tiny", "alias"],
            "accepted_model_names": ["/models/tiny"],
            "max_model_len": 64,
            "vocab_size": sim.VOCAB_SIZE,
            **settings,
        },
        ApiConfig,
    )
    metrics = WorkerMetrics("tiny", 64, 1.0)
    admission = Admission(
        engine,
        metrics,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
    )
    template = ChatTemplate(template_source, bos_token="", eos_token=sim.IM_END, now=datetime.now)
    text = ModelText(
        tokenizer or sim.SimTokenizer(),
        template,
        ModelLimits(config.max_model_len, config.vocab_size),
        eos_token_ids=(sim.IM_END_ID, sim.IM_START_ID),
        grammars=sim_grammars(),
    )
    accepted = config.accepted_model_names
    adapters = ServedAdapters(engine, config.served_model_names, True, accepted)
    checks = RequestChecks(config, text, random.Random(0), adapters)
    engine_config = EngineConfig(engine="sim", model_path=None)
    app = WorkerApi(config, engine, admission, metrics, checks, engine_config)
    return Api(app, config, engine, admission, metrics)


def client_of(api: Api) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=api.app)
    return httpx.AsyncClient(transport=transport, base_url="http://worker")


@asynccontextmanager
async def listening(api: Api) -> AsyncIterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(
            api.app,
            host="127.0.0.1",
            port=0,
            http=protocol_of(api.config, api.metrics.http.refused),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve())
        while True:
            await asyncio.sleep(0)
            if server.started:
                break
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await serving


def events_of(text: str) -> list[Any]:
    frames = [frame for frame in text.split("\n\n") if frame.startswith("data: ")]
    assert frames.pop() == "data: [DONE]"
    return [msgspec.json.decode(frame.removeprefix("data: ")) for frame in frames]


@dataclass
class Bench:
    engine: ScriptedEngine
    tokenizer: sim.SimTokenizer = field(default_factory=sim.SimTokenizer)
    template_source: str = sim.CHAT_TEMPLATE
    say = staticmethod(output)
    logprob = staticmethod(logprob)

    def api(self, **settings: object) -> Api:
        return build(self.engine, self.tokenizer, self.template_source, **settings)

    def client(self, **settings: object) -> httpx.AsyncClient:
        return client_of(self.api(**settings))

    async def post(self, path: str, body: Any, **settings: object) -> httpx.Response:
        async with self.client(**settings) as client:
            return await client.post(path, json=body)

    async def answer(self, path: str, body: Any, **settings: object) -> Any:
        response = await self.post(path, body, **settings)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, body: Any, **settings: object) -> list[Any]:
        response = await self.post(path, {**body, "stream": True}, **settings)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    client_of = staticmethod(client_of)
    listening = staticmethod(listening)


@pytest.fixture
def bench() -> Bench:
    end = output([ord("i"), sim.IM_END_ID], FinishReason.STOP, stop_token=sim.IM_END_ID)
    return Bench(ScriptedEngine([output("h"), end]))


@pytest.fixture
def watched(bench: Bench) -> WatchedTokenizer:
    bench.tokenizer = WatchedTokenizer()
    return bench.tokenizer


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    from tests.support.worker.grammar_bench import VOCABULARY  # which imports torch

    compiler = GrammarCompiler(VOCABULARY)
    yield compiler
    compiler.shutdown()
