"""Chats in a terminal, against a canned OpenAI server."""

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fleet.commands import chat as room
from fleet.commands.chat import ChatOptions, Terminal, Wrapped
from fleet.errors import FleetError
from fleet.http_client import first_model
from fleet.run.catalog import BETTER, DEFAULT, CatalogModel
from fleet.run.models import cached_path

COMMANDS = ["/help", "/clear", "/system", "/exit"]


def delta(text: str) -> dict:
    return {"choices": [{"delta": {"content": text}}]}


class Canned(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = 200
        self.models: object = {"data": [{"id": "canned"}]}
        self.events: list[object] = [delta("Hel"), delta("lo"), {"choices": []}, "[DONE]"]
        self.asked: list[dict] = []
        self.looked_up: list[str] = []
        self.headers: dict[str, str] = {}
        self.holds_after_first = False  # of the first answer, until the client has disconnected
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Canned

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.looked_up.append(self.path)
        models = self.server.models
        known = {"summary": {"endpoint": "worker-1"}}
        self._send(json.dumps(models if self.path == "/v1/models" else known).encode())

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.asked.append(json.loads(self.rfile.read(length)))
        if self.server.status != 200:
            self._send(json.dumps({"error": {"message": "too long"}}).encode())
            return
        lines = [e if isinstance(e, str) else json.dumps(e) for e in self.server.events]
        frames = [f"data: {line}\n\n".encode() for line in lines]
        if self.server.holds_after_first and len(self.server.asked) == 1:
            self._begin(sum(map(len, frames)))
            self.wfile.write(frames[0])
            self.rfile.read(1)  # ends when the client has closed the connection
            return
        self._send(b"".join(frames))

    def _send(self, body: bytes) -> None:
        self._begin(len(body))
        self.wfile.write(body)

    def _begin(self, length: int) -> None:
        self.send_response(self.server.status if self.command == "POST" else 200)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(length))
        self.end_headers()


@pytest.fixture
def server() -> Iterator[Canned]:
    with Canned() as canned:
        thread = threading.Thread(target=canned.serve_forever, args=(0.01,))
        thread.start()
        yield canned
        canned.shutdown()
        thread.join()


class User:
    """Types `lines` and then Ctrl-D, or presses the keys that they name."""

    def __init__(self, *lines: str | type[BaseException], there: bool = True) -> None:
        self.lines = list(lines)
        self.shown = ""
        self.noted: list[str] = []
        self.terminal = Terminal(self.write, self.read_line, self.note if there else None)

    def write(self, text: str) -> None:
        self.shown += text

    def note(self, text: str) -> None:
        self.noted.append(text.removesuffix("\n"))

    def read_line(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


def chat(options: ChatOptions, user: User, fetch: room.Fetch | None = None) -> int:
    return room.chat(options, user.terminal, fetch)


def talk(server: Canned, *lines: str | type[BaseException], **options: Any) -> User:
    """Return the user of a whole conversation, or of one `prompt`."""
    user = User(*lines, there=options.pop("there", True))
    assert chat(ChatOptions(server.url, **options), user) == 0
    return user


def test_one_prompt_one_answer(server: Canned) -> None:
    user = talk(server, prompt="hi", max_tokens=5, temperature=0.0)
    assert user.shown == "Hello\n"
    assert server.asked == [
        {
            "model": "canned",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 0.0,
        }
    ]


def test_a_conversation_remembers(server: Canned) -> None:
    talk(server, "one", "  ", "two", system="be brief")
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert server.asked[1]["messages"][2]["content"] == "Hello"
    assert len(server.asked) == 2


@pytest.mark.parametrize("answer", [{"data": []}, {"data": {}}, [], "no"])
def test_a_server_that_names_no_model_is_one_sentence(server: Canned, answer: object) -> None:
    server.models = answer
    with pytest.raises(FleetError, match=rf"^{server.url}/v1/models lists no model: .*--model"):
        first_model(server.url)


def test_a_silent_server_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(FleetError, match=r"no useful answer from .*: timed out"):
            first_model(url, timeout_seconds=0.05)


def test_a_missing_server_is_one_sentence_with_the_remedy() -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(FleetError, match=rf"nothing answers at {url} \(.+\): .*pointsman up"):
        chat(ChatOptions(url), User())


def test_a_refusal_is_shown_in_the_servers_words(server: Canned) -> None:
    server.status = 400
    with pytest.raises(FleetError, match=r"refuses \(400\): too long"):
        talk(server, prompt="hi")


@pytest.mark.parametrize(
    "events",
    [[delta("Hel")], [delta("Hel"), {"error": {"message": "the engine is gone"}}]],
    ids=["cut", "error event"],
)
def test_a_broken_answer_is_never_taken_for_a_whole_one(server: Canned, events: list) -> None:
    """An answer without its end is an error, even if parts were shown."""
    server.events = events
    user = User()
    with pytest.raises(FleetError, match="the answer broke off"):
        chat(ChatOptions(server.url, prompt="hi"), user)
    assert user.shown == "Hel"


def usage(**counts: object) -> dict:
    return {"choices": [], "usage": counts}


def test_facts_of_an_answer_are_below_it(server: Canned) -> None:
    details = {"cached_tokens": 3}
    counts = usage(completion_tokens=1, prompt_tokens=9, prompt_tokens_details=details)
    server.events = [delta("Hello"), counts, "[DONE]"]
    server.headers = {"x-request-id": "id-1"}
    first = talk(server, prompt="hi", picker=server.url)
    server.headers = {"x-pointsman-endpoint": "worker-2"}
    second = talk(server, prompt="hi")
    for number, user in enumerate((first, second), 1):
        assert user.noted == [f"1 token, 3 of 9 prompt tokens cached, worker-{number}"]
    assert server.looked_up == ["/v1/models", "/decisions/id-1", "/v1/models"]


def test_the_rate_counts_the_tokens_behind_the_first(server: Canned) -> None:
    server.events = [delta("Hel"), delta("lo"), usage(completion_tokens=20), "[DONE]"]
    (line,) = talk(server, prompt="hi").noted
    assert re.fullmatch(r"20 tokens, [\d.]+ tokens/s", line)


def test_commands_are_not_sent(server: Canned) -> None:
    said = ("one", "/system be brief", "/clear", "two", "/system", "/etc/hosts?", "/exit", "x")
    user = talk(server, *said, system="be long")
    asked = [[(one["role"], one["content"]) for one in body["messages"]] for body in server.asked]
    assert asked[0] == [("system", "be long"), ("user", "one")]
    assert asked[1] == [("system", "be brief"), ("user", "two")]
    assert asked[2][-1] == ("user", "/etc/hosts?")
    assert (len(asked), "be brief" in user.noted, user.lines) == (3, True, ["x"])


def test_help_and_unknown_commands_are_noted(server: Canned) -> None:
    user = talk(server, "/help", "/cler")
    assert [line.split()[0] for line in user.noted[1].splitlines()] == COMMANDS
    assert user.noted[2] == "there is no command /cler; did you mean /clear? (/help lists them)"
    assert server.asked == []


def test_ctrl_c_at_the_prompt_does_not_leave(server: Canned) -> None:
    talk(server, KeyboardInterrupt, "one")
    assert len(server.asked) == 1


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(server: Canned) -> None:
    class Impatient(User):
        def write(self, text: str) -> None:
            super().write(text)
            if text == "Hel" and len(server.asked) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    user = Impatient("one", "two")
    server.holds_after_first = True
    assert chat(ChatOptions(server.url), user) == 0
    assert user.shown == "Hel …\nHello\n"
    assert [one["content"] for one in server.asked[1]["messages"]] == ["one", "Hel", "two"]


def test_a_conversation_outlives_a_failure(server: Canned) -> None:
    server.status = 400
    user = talk(server, "one", "two")
    assert user.noted[1:3] == ["\npointsman: the server refuses (400): too long"] * 2
    with pytest.raises(FleetError, match="too long"):
        talk(server, "one", there=False)


def test_a_pipe_gets_answers_alone(server: Canned) -> None:
    user = talk(server, "one", "two", there=False)
    assert (user.shown, user.noted) == ("Hello\nHello\n", [])


def test_commands_work_in_a_pipe(server: Canned) -> None:
    user = User("/system be brief", "/system", "/help", "/cler", "one", there=False)
    with pytest.raises(FleetError, match="there is no command /cler; did you mean /clear"):
        chat(ChatOptions(server.url), user)
    first, *lines = user.shown.splitlines()
    assert (first, [line.split()[0] for line in lines]) == ("be brief", COMMANDS)
    assert server.asked == []


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (("Trains ne", "ed rails"), "Trains\nneed rails"),
        (("one two", " three", " four"), "one two\nthree four"),
        (("a\n\nbc defghij", " kl"), "a\n\nbc defghij\nkl"),
        (("  indented", " text"), "  indented\ntext"),
        (("a longer-than-the-line word",), "a\nlonger-than-the-line\nword"),
        (("你好 世界 你好",), "你好 世界 \n你好"),  # two columns each
        (("0123456789", " x"), "0123456789\nx"),
    ],
)
def test_lines_of_a_terminal_end_between_words(pieces: tuple[str, ...], shown: str) -> None:
    written: list[str] = []
    write = Wrapped(written.append, lambda: 10)
    for piece in (*pieces, "\n"):
        write(piece)
    assert "".join(written).replace(" \n", "\n") == shown.replace(" \n", "\n") + "\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine with room for everything."""
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 99000000 kB\n")
    monkeypatch.setattr("fleet.run.models._MEMINFO", meminfo)
    return tmp_path


@pytest.mark.parametrize(
    ("answer", "fetched", "said"),
    [
        ("y", [BETTER], f"fetched; `pointsman up --model {BETTER.name}` serves it"),
        ("", [], f"`pointsman up --model {BETTER.name}` fetches and serves it"),
        (EOFError, [], f"`pointsman up --model {BETTER.name}` fetches and serves it"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_first_chat_offers_a_better_model(
    server: Canned, answer: str | type[BaseException], fetched: list[CatalogModel], said: str
) -> None:
    server.models = {"data": [{"id": DEFAULT.name}]}
    asked: list[CatalogModel] = []
    first, second = User(answer, "one"), User("two")
    assert chat(ChatOptions(server.url), first, asked.append) == 0
    assert chat(ChatOptions(server.url), second, asked.append) == 0
    assert asked == fetched
    assert said in first.noted
    assert [body["messages"][-1]["content"] for body in server.asked] == ["one", "two"]


@pytest.mark.parametrize("why", ["a script", "one prompt", "another model", "it is here"])
def test_without_an_offer_the_user_is_not_asked(server: Canned, cache: Path, why: str) -> None:
    server.models = {"data": [{"id": "other" if why == "another model" else DEFAULT.name}]}
    if why == "it is here":
        cached_path(BETTER).parent.mkdir()
        cached_path(BETTER).touch()
    user = User("one", there=why != "a script")
    options = ChatOptions(server.url, prompt="one" if why == "one prompt" else None)
    assert chat(options, user, lambda _: pytest.fail("fetched")) == 0
    assert [body["messages"][-1]["content"] for body in server.asked] == ["one"]
    assert not list(cache.rglob("*.offered"))


def test_an_answer_without_an_end_is_cut(server: Canned) -> None:
    server.events = [delta("x") for _ in range(1100)] + ["[DONE]"]
    assert talk(server, prompt="hi", there=False).shown == "x" * 1024 + " …\n"
    user = talk(server, prompt="hi", there=False, max_tokens=1100)
    assert user.shown == "x" * 1100 + "\n"
