"""Renders chat messages as prompt text with the model's own Jinja template, in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from worker.errors import ModelError, RequestError
from worker.tokenizer.checkpoint import Checkpoint
from worker.tokenizer.sandbox import BudgetedEnvironment, RenderLimits

# Variables that a client cannot set: other fields of the request decide them.
RESERVED_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; its blank shows a trim
_MAX_INDENT = 16  # else every line of a short value could be long
_PROBED = {"probed": "argument"}
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and (not isinstance(indent, int) or indent > _MAX_INDENT):
        raise SecurityError(f"tojson: an indent of {indent!r} is not supported")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    # It marks what training learns from, and has no effect on a render.
    tags = {"generation"}  # noqa: RUF012  (Jinja's protocol)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, compiled once; thread-safe. `now` is the clock of `strftime_now`."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        now: Callable[[], datetime],
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """Compile the templates; `tool_source` is for requests with tools. Raises `ModelError`."""
        environment = BudgetedEnvironment(limits or RenderLimits(), [_Generation, loopcontrols])
        # As transformers replaces it: Jinja's own escapes signs for HTML.
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._environment = environment
        self.source = source
        self._template = self._compiled(source)
        self._tool_template = self._template if tool_source is None else self._compiled(tool_source)
        self._tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._reserved = RESERVED_VARIABLES | self._tokens.keys()
        self.tool_source = source if tool_source is None else tool_source

    @property
    def shows_tools(self) -> bool:
        return "tools" in self.tool_source

    @cached_property
    def takes_argument_objects(self) -> bool:
        """True if arguments are taken as objects, not JSON text. Found by rendering both."""
        return self._writes_arguments(_PROBED) or not self._writes_arguments(json.dumps(_PROBED))

    def _writes_arguments(self, arguments: object) -> bool:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "probe0001", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "probe"},
        ]
        tool = {"name": "probe", "description": "probe", "parameters": {"type": "object"}}
        try:
            text = self.render(messages, tools=[{"type": "function", "function": tool}])
        except RequestError:
            return False
        return json.dumps(_PROBED)[1:-1] in text

    def _compiled(self, source: str) -> Template:
        try:
            return self._environment.from_string(source)
        except (TemplateSyntaxError, SyntaxError, RecursionError) as error:
            # Jinja compiles to Python, which limits the nesting of blocks.
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation. `continue_final_message` ends it with the last
        message's text. `variables` are the client's (`chat_template_kwargs`). Raises `RequestError`
        (400) for a reserved variable, for messages that the template refuses, and for a render over
        its budget.
        """
        reserved = sorted(self._reserved & (variables or {}).keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}",
                param="chat_template_kwargs",
            )
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            # Templates may add text after a message or trim it; the mark shows where it ends.
            messages = _tagged(messages)
        # The model's own variables come last, so that no client variable replaces them.
        values = {
            **(variables or {}),
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tool_template if tools else self._template
        try:
            text = self._environment.render_within_limits(template, values)
        # Not among `_REFUSALS`: its own message would name Python's limit.
        except RecursionError as error:
            raise _refusal("it nests too deeply") from error
        except _REFUSALS as error:
            raise _refusal(str(error)) from error
        return _cut_at_tag(text) if continue_final_message else text


def chat_template_of(checkpoint: Checkpoint, now: Callable[[], datetime]) -> ChatTemplate | None:
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(
        checkpoint.chat_template,
        bos_token=checkpoint.bos_token,
        eos_token=checkpoint.eos_token,
        now=now,
        special_tokens=checkpoint.special_tokens,
        tool_source=checkpoint.tool_chat_template,
    )


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the chat template refused the messages: {reason}", param="messages")


def _tagged(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    content = messages[-1].get("content") if messages else None
    marked: str | list[Any] | None = None
    if isinstance(content, str):
        marked = content + _CONTINUE_TAG
    elif isinstance(content, list | tuple):
        marked = list(content)
        for index in reversed(range(len(marked))):
            part = marked[index]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked[index] = {**part, "text": part["text"] + _CONTINUE_TAG}
                break
        else:
            marked = None
    if marked is None:
        raise RequestError(
            "continue_final_message needs a final message with text to continue",
            param="continue_final_message",
        )
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _cut_at_tag(text: str) -> str:
    """Return the text before the tag; its end is trimmed if the template trims messages."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message: the chat template leaves the final message out",
            param="continue_final_message",
        )
    head = text[:at]
    return head if text.startswith(_CONTINUE_TAG, at) else head.rstrip()
