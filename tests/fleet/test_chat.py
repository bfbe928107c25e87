"""Chatting in the terminal, against a canned OpenAI server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleet.chat import ChatOptions, chat
from fleet.errors import FleetError


def delta(text: str) -> dict:
    """One streamed piece of an answer."""
    return {"choices": [{"delta": {"content": text}}]}


class Canned(ThreadingHTTPServer):
    """Streams `events` to everyone and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = 200
        self.events: list[object] = [delta("Hel"), delta("lo"), {"choices": []}, "[DONE]"]
        self.asked: list[dict] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Canned

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "canned"}]}).encode())

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.asked.append(json.loads(self.rfile.read(length)))
        if self.server.status != 200:
            self._send(json.dumps({"error": {"message": "too long"}}).encode())
            return
        lines = [e if isinstance(e, str) else json.dumps(e) for e in self.server.events]
        self._send("".join(f"data: {line}\n\n" for line in lines).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(self.server.status if self.command == "POST" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Canned]:
    with Canned() as canned:
        thread = threading.Thread(target=canned.serve_forever, args=(0.01,))
        thread.start()
        yield canned
        canned.shutdown()
        thread.join()


class Terminal:
    """A user who types `lines` and then Ctrl-D."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.shown = ""

    def write(self, text: str) -> None:
        """Collect what is shown."""
        self.shown += text

    def read_line(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


def test_one_prompt_one_answer(server: Canned) -> None:
    """With a prompt on the command line the answer is printed and that is all."""
    terminal = Terminal()
    options = ChatOptions(server.url, prompt="hi", max_tokens=5, temperature=0.0)
    assert chat(options, terminal.write, terminal.read_line) == 0
    assert terminal.shown == "Hello\n"
    assert server.asked == [
        {
            "model": "canned",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 5,
            "temperature": 0.0,
        }
    ]


def test_a_conversation_remembers(server: Canned) -> None:
    """Each question goes out with everything said before; blank lines are not sent."""
    terminal = Terminal("one", "  ", "two")
    chat(ChatOptions(server.url, system="be brief"), terminal.write, terminal.read_line)
    assert [message["role"] for message in server.asked[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert server.asked[1]["messages"][2]["content"] == "Hello"
    assert len(server.asked) == 2


def test_nobody_there_is_one_sentence_with_the_remedy() -> None:
    """The sentence names the address and the command that starts a fleet."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    terminal = Terminal()
    with pytest.raises(FleetError, match=rf"nobody answers at {url}: .*pointsman up"):
        chat(ChatOptions(url), terminal.write, terminal.read_line)


def test_a_refusal_is_shown_in_the_servers_words(server: Canned) -> None:
    """An error answer is its status and its message."""
    server.status = 400
    terminal = Terminal()
    with pytest.raises(FleetError, match=r"refuses \(400\): too long"):
        chat(ChatOptions(server.url, prompt="hi"), terminal.write, terminal.read_line)


@pytest.mark.parametrize(
    "events",
    [[delta("Hel")], [delta("Hel"), {"error": {"message": "the engine is gone"}}]],
    ids=["cut", "error event"],
)
def test_a_broken_answer_is_never_taken_for_a_whole_one(server: Canned, events: list) -> None:
    """An answer without its end is an error, whatever has been shown of it."""
    server.events = events
    terminal = Terminal()
    with pytest.raises(FleetError, match="the answer broke off"):
        chat(ChatOptions(server.url, prompt="hi"), terminal.write, terminal.read_line)
    assert terminal.shown == "Hel"
