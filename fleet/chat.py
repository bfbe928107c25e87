# Apart: a subcommand, imported only when it runs.
"""`pointsman chat`: talk to a model through any OpenAI-compatible address, in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from fleet.errors import FleetError

Write = Callable[[str], None]
ReadLine = Callable[[str], str]
_PROMPT = "> "


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user asked `pointsman chat` for. `model` None: the first one served."""

    url: str = "http://127.0.0.1:8080"
    model: str | None = None
    system: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(slots=True)
class Conversation:
    """Owns what has been said so far, as chat messages."""

    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer; one that never began takes its question back with it."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()


def chat(options: ChatOptions, write: Write, read_line: ReadLine) -> int:
    """Answer one prompt, or talk until `read_line` raises EOFError; returns the exit status.

    Ctrl-C cancels the answer being written. Raises `FleetError` when the server cannot be reached
    or refuses.
    """
    conversation = Conversation()
    if options.system is not None:
        conversation.messages.append({"role": "system", "content": options.system})
    with asyncio.Runner() as runner:
        model = options.model or runner.run(first_model(options.url))
        if options.prompt is not None:
            finished = runner.run(_turn(options, model, conversation, options.prompt, write))
            return 0 if finished else 130
        write(f"{model} at {options.url}; Ctrl-C stops an answer, Ctrl-D leaves\n")
        while True:
            try:
                text = read_line(_PROMPT).strip()
            except (EOFError, KeyboardInterrupt):
                write("\n")
                return 0
            if text:
                runner.run(_turn(options, model, conversation, text, write))


async def first_model(url: str, headers: Sequence[tuple[str, str]] = ()) -> str:
    """The id of the first model that is served. Raises `FleetError`."""
    async with _client(url) as client, _explained(url):
        response = await client.get("/v1/models", headers=list(headers))
        if response.status_code != 200:
            raise FleetError(_refusal(response.status_code, response.text))
        return str(response.json()["data"][0]["id"])


async def _turn(
    options: ChatOptions, model: str, conversation: Conversation, text: str, write: Write
) -> bool:
    """Ask, and write the answer as it comes; False when Ctrl-C ended it early."""
    conversation.ask(text)
    said: list[str] = []
    answering = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if answering is not None:
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
    finished = False
    try:
        async for piece in _stream(options, model, conversation.messages):
            said.append(piece)
            write(piece)
        finished = True
    except asyncio.CancelledError:
        write(" …")
        if answering is not None:
            answering.uncancel()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        conversation.answer("".join(said))
    write("\n")
    return finished


async def _stream(
    options: ChatOptions, model: str, messages: list[dict[str, str]]
) -> AsyncIterator[str]:
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    async with _client(options.url) as client, _explained(options.url):  # noqa: SIM117
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                raise FleetError(_refusal(response.status_code, text))
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield _content(json.loads(data))
    raise FleetError("the answer broke off: the worker behind it is gone")


def _content(event: dict[str, Any]) -> str:
    """The text in one streamed event. Raises `FleetError` for an error event."""
    if "error" in event:
        raise FleetError(f"the answer broke off: {event['error'].get('message', event['error'])}")
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _client(url: str) -> httpx.AsyncClient:
    # Silence may be long while a prompt is read; a missing server is known at once.
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300.0, connect=5.0))


@contextlib.asynccontextmanager
async def _explained(url: str) -> AsyncIterator[None]:
    """What went wrong on the way, as one sentence."""
    try:
        yield
    except httpx.ConnectError as error:
        raise FleetError(
            f"nobody answers at {url}: start a fleet with `pointsman up`, or give --url"
        ) from error
    except httpx.RemoteProtocolError as error:
        raise FleetError("the answer broke off: the connection was lost") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise FleetError(f"no useful answer from {url}: {error or type(error).__name__}") from error


def _refusal(status: int, text: str) -> str:
    """The reason in an error answer, whatever its shape."""
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        pass
    return f"the server refuses ({status}): {text.strip()[:300]}"
