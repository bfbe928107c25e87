"""`pointsman chat`: talk to a model through any OpenAI-compatible address, in the terminal."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len

from base.flags import near
from fleet.errors import FleetError
from fleet.http_client import (
    HTTP_ERRORS,
    SILENCE_SECONDS,
    explained,
    first_model,
    get,
    opened,
    refusal,
)
from fleet.run.catalog import CatalogModel
from fleet.run.models import offer

Write = Callable[[str], None]
ReadLine = Callable[[str], str]
Fetch = Callable[[CatalogModel], object]
_PROMPT = "> "
_PARTS = re.compile(r"\s+|\S+")
_COMMAND = re.compile(r"/\w*")  # so `/etc/hosts` is not a command
_HELP = {
    "/help": "what can be typed",
    "/clear": "forget what has been said",
    "/system": "TEXT: instructions for the model from now on; without a text: show them",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}
_LOOK_UP_SECONDS = 2.0
# The limit of an answer without --max-tokens, as small models may repeat themselves without end. It
# is not sent to the server, which may have a shorter context.
_MAX_PIECES = 1024


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a chat. `picker` is asked for the worker if the answer does not name it."""

    url: str = "http://127.0.0.1:8080"
    model: str | None = None
    system: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    picker: str | None = None


@dataclass(frozen=True, slots=True)
class Terminal:
    """A chat's user. `write` gets answers, `note` remarks; it is None if no user reads them."""

    write: Write
    read_line: ReadLine
    note: Write | None = None


class Wrapped:
    """Writes text in lines that end between words; a word appears once it is complete."""

    def __init__(self, write: Write, columns: Callable[[], int]) -> None:
        self._write, self._columns = write, columns
        self._column = 0
        self._word = ""

    def __call__(self, text: str) -> None:
        for part in _PARTS.findall(text):
            if not part.isspace():
                self._word += part
                continue
            self._end_word()
            self._write(part)
            last = part.rpartition("\n")
            self._column = len(last[2]) + (0 if last[1] else self._column)

    def _end_word(self) -> None:
        width = cell_len(self._word)
        if self._column > 0 and self._column + width > self._columns():
            self._write("\n")
            self._column = 0
        self._write(self._word)
        self._column += width
        self._word = ""


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        if self.system is None:
            return list(self.turns)
        return [{"role": "system", "content": self.system}, *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer; without one, remove the question again."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()


@dataclass(slots=True)
class _Facts:
    request_id: str | None = None
    endpoint: str | None = None
    usage: dict[str, Any] | None = None
    first_seconds: float | None = None
    last_seconds: float = 0.0
    num_pieces: int = 0

    def piece_came(self) -> None:
        self.num_pieces += 1
        self.last_seconds = time.monotonic()
        if self.first_seconds is None:
            self.first_seconds = self.last_seconds

    def __str__(self) -> str:
        usage = self.usage or {}
        num_tokens, num_prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        parts = []
        if num_tokens is not None:
            parts.append(f"{num_tokens} token{'' if num_tokens == 1 else 's'}")
            took = self.last_seconds - (self.first_seconds or 0.0)
            if num_tokens > 1 and took > 0:
                # The first token ends the prompt; rates count those behind it.
                parts.append(f"{(num_tokens - 1) / took:.1f} tokens/s")
        if cached is not None and num_prompt is not None:
            parts.append(f"{cached} of {num_prompt} prompt tokens cached")
        if self.endpoint is not None:
            parts.append(self.endpoint)
        return ", ".join(parts)


def chat(options: ChatOptions, terminal: Terminal, fetch: Fetch | None = None) -> int:
    """Answer one prompt, or talk until `read_line` raises EOFError; return the exit status. `fetch`
    downloads a model that is offered first. Raises `FleetError` when the server cannot be reached
    or refuses; in a conversation with a user, only at its beginning.
    """
    model = options.model or first_model(options.url)
    talk = _Talk(options, model, terminal)
    # Also if the parent process ignores it, as shells do for background jobs.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if options.prompt is not None:
            return 0 if talk.turn(options.prompt) else 130
        talk.note(f"{model} at {options.url}; /help lists commands, Ctrl-D leaves")
        if fetch is not None:
            talk.offer(fetch)
        talk.run()
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


class _Talk:
    def __init__(self, options: ChatOptions, model: str, terminal: Terminal) -> None:
        self._options = options
        self._model = model
        self._terminal = terminal
        self._conversation = Conversation(options.system)

    def note(self, line: str) -> None:
        if self._terminal.note is not None:
            self._terminal.note(f"{line}\n")

    def offer(self, fetch: Fetch) -> None:
        """Ask once whether to download a better model than the default one, if there is room."""
        better = None if self._terminal.note is None else offer(self._model)
        if better is None:
            return
        size = f"{better.size_bytes / 1e6:.0f} MB"
        self.note(f"{self._model} is small and often wrong. {better.name} is better.")
        try:
            answer = self._terminal.read_line(f"Fetch it now, {size}? [y/N] ")
        except (EOFError, KeyboardInterrupt):
            answer = ""
        command = f"pointsman up --model {better.name}"
        if answer.strip().lower() not in ("y", "yes"):
            self.note(f"`{command}` fetches and serves it")
            return
        try:
            fetch(better)
            self.note(f"fetched; `{command}` serves it")
        except FleetError as error:
            self.note(f"pointsman: {error}")

    def run(self) -> None:
        while True:
            try:
                text = self._terminal.read_line(_PROMPT).strip()
            except EOFError:
                self.note("")
                return
            except KeyboardInterrupt:
                self.note("\nCtrl-D leaves")
                continue
            word, _, rest = text.partition(" ")
            if _COMMAND.fullmatch(word):
                if word == "/exit":
                    return
                self._obey(word, rest.strip())
            elif text:
                self._turn_or_note(text)

    def _turn_or_note(self, text: str) -> None:
        try:
            self.turn(text)
        except FleetError as error:
            if self._terminal.note is None:
                raise
            self.note(f"\npointsman: {error}")

    def _obey(self, command: str, text: str) -> None:
        if command == "/help":
            self._show("\n".join(f"{name:<9}{meaning}" for name, meaning in _HELP.items()))
        elif command == "/clear":
            self._conversation.turns.clear()
            self.note("the conversation begins anew")
        elif command == "/system":
            if text:
                self._conversation.system = text
            else:
                self._show(self._conversation.system or "no instructions yet")
        else:
            text = f"there is no command {command}{near(command, _HELP)} (/help lists them)"
            if self._terminal.note is None:
                raise FleetError(text)
            self.note(text)

    def _show(self, text: str) -> None:
        if self._terminal.note is None:
            self._terminal.write(f"{text}\n")
        else:
            self.note(text)

    def turn(self, text: str) -> bool:
        """Ask, and write the answer as it arrives; return False if Ctrl-C ended it early."""
        self._conversation.ask(text)
        said: list[str] = []
        facts = _Facts()
        finished = False
        try:
            # Closing disconnects, which ends the answer at the server, too.
            with contextlib.closing(self._stream(facts)) as pieces:
                for piece in pieces:
                    said.append(piece)
                    self._terminal.write(piece)
            finished = True
        except KeyboardInterrupt:
            self._terminal.write(" …")
        finally:
            self._conversation.answer("".join(said))
        self._terminal.write("\n")
        if self._terminal.note is not None:
            self._look_up(facts)
            if line := str(facts):
                self.note(line)
        return finished

    def _stream(self, facts: _Facts) -> Generator[str, None, None]:
        options = self._options
        messages = self._conversation.messages
        body: dict[str, Any] = {"model": self._model, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        if options.temperature is not None:
            body["temperature"] = options.temperature
        url, headers = options.url.rstrip("/"), {"content-type": "application/json"}
        with (
            explained(url),
            opened(
                f"{url}/v1/chat/completions", SILENCE_SECONDS, headers, json.dumps(body).encode()
            ) as response,
        ):
            if response.status != 200:
                raise FleetError(refusal(response.status, response.read()))
            facts.request_id = response.headers.get("x-request-id")
            facts.endpoint = response.headers.get("x-pointsman-endpoint")
            for line in response:
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    piece = _content(event)
                    if piece:
                        facts.piece_came()
                    facts.usage = event.get("usage") or facts.usage  # null but in the last chunk
                    yield piece
                    if options.max_tokens is None and facts.num_pieces == _MAX_PIECES:
                        yield " …"
                        return
        # Without `[DONE]` it is not the whole answer.
        raise FleetError("the answer broke off: the worker behind it is gone")

    def _look_up(self, facts: _Facts) -> None:
        """Ask the picker for the worker's name; if that fails, the name is only left out."""
        picker, request_id = self._options.picker, facts.request_id
        if facts.endpoint is not None or picker is None or request_id is None:
            return
        with contextlib.suppress(*HTTP_ERRORS, LookupError):
            answer = get(f"{picker}/decisions/{request_id}", _LOOK_UP_SECONDS)
            if answer.status == 200:
                facts.endpoint = json.loads(answer.content)["summary"]["endpoint"]


def _content(event: dict[str, Any]) -> str:
    """Return the text of an event. Raises `FleetError` for an error event."""
    if "error" in event:
        raise FleetError(f"the answer broke off: {event['error'].get('message', event['error'])}")
    choices = event.get("choices") or [{}]  # the chunk with the usage has none
    return choices[0].get("delta", {}).get("content") or ""
