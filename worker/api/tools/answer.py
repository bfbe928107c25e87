"""Splits an answer's text, as it comes, into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from worker.api.tools.json_calls import (
    ARGS,
    CALL_ID,
    END_OF_TOOL_CALL,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
    arguments_of,
    marked_object,
    mistral_calls,
    plain_calls,
)
from worker.api.tools.python_calls import PYTHON_END, PYTHON_START, python_calls
from worker.api.tools.scanner import Malformed, Parse, Scanner, Unfinished
from worker.api.tools.writer import AnswerWriter, Said
from worker.api.tools.xml_calls import END_OF_FUNCTION, FUNCTION, tagged_call

Schemas = Mapping[str, Mapping[str, Any]]
Calls = Callable[[Scanner, AnswerWriter], Parse[None]]

THINK, END_OF_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a model's calls. A call may begin anywhere with one of `begins`; if there are
    none, calls must start at the beginning of an answer. `short_ids`: templates take only ids of
    nine letters and digits.
    """

    calls: Callable[[Schemas], Calls]
    begins: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    short_ids: bool = False


_HERMES = ToolFormat(lambda _: marked_object, (TOOL_CALL,), (TOOL_CALL, END_OF_TOOL_CALL))
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "json": ToolFormat(lambda _: plain_calls),
    "llama3_json": ToolFormat(lambda _: plain_calls, marks=(PYTHON_TAG,)),
    "mistral": ToolFormat(
        lambda _: mistral_calls, (TOOL_CALLS,), (TOOL_CALLS, CALL_ID, ARGS), short_ids=True
    ),
    "pythonic": ToolFormat(lambda _: python_calls, marks=(PYTHON_START, PYTHON_END)),
    "qwen3": _HERMES,
    "qwen3_coder": ToolFormat(
        lambda schemas: partial(tagged_call, schemas=schemas),
        (TOOL_CALL, FUNCTION),
        (TOOL_CALL, END_OF_TOOL_CALL, FUNCTION, END_OF_FUNCTION),
    ),
}
# Texts that only templates of such models write, the most distinctive first.
_TELLING = (
    ("<function=", "qwen3_coder"),
    (TOOL_CALL, "hermes"),
    (TOOL_CALLS, "mistral"),
    (PYTHON_START, "pythonic"),
    ("func_name1(params_name1=", "pythonic"),
    (PYTHON_TAG, "llama3_json"),
    ('{"name": function name, "parameters": ', "llama3_json"),
)
# True if the model reasons first even where the prompt does not open the reasoning.
REASONING_FORMATS = {"deepseek_r1": True, "qwen3": False}
REASONING_MARKS = (THINK, END_OF_THINK)


def format_of_template(source: str) -> str | None:
    return next((name for mark, name in _TELLING if mark in source), None)


def begins_with_reasoning(reasoning_format: str, prompt: str, *, opens_a_turn: bool) -> bool:
    """Return whether an answer begins with reasoning; a prompt may open it, or close it at once."""
    end = prompt.rstrip()
    if end.endswith(REASONING_MARKS) or not opens_a_turn:
        return end.endswith(THINK)
    return REASONING_FORMATS[reasoning_format]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The parts to find in the answers to one request. `schemas` describe arguments, by function;
    `tool_format` None: no calls. `named`: the whole answer is the arguments of that function.
    `reasons` None: no reasoning; else True if it begins in the prompt. `hidden` are control tokens.
    """

    new_id: Callable[[], str]
    schemas: Schemas = field(default_factory=dict)
    tool_format: str | None = None
    named: str | None = None
    only_one: bool = False
    reasons: bool | None = None
    shows_reasoning: bool = True
    hidden: tuple[str, ...] = ()

    def without_calls(self) -> AnswerForm | None:
        """Return the form of an answer without calls; None if its text is the answer."""
        if self.reasons is None:
            return None
        return replace(self, schemas={}, tool_format=None, named=None)

    def parser(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """Parses one answer. How the text is cut affects the pieces of its results, not their sum."""

    def __init__(self, form: AnswerForm) -> None:
        self._scanner = Scanner()
        self._writer = AnswerWriter(
            form.new_id,
            hidden=form.hidden,
            known_names=form.schemas.keys(),
            only_one=form.only_one,
            shows_reasoning=form.shows_reasoning,
        )
        self._parse = _answer(form, self._scanner, self._writer)

    @property
    def num_calls(self) -> int:
        return self._writer.num_calls

    def feed(self, text: str) -> Said:
        self._scanner.feed(text)
        next(self._parse)  # it waits for more text until the end
        return self._writer.take()

    def finish(self, *, complete: bool, truncated: bool) -> Said:
        """Return the rest. `complete`: marks may be missing; `truncated`: a begun call stays."""
        self._scanner.ended = True
        self._scanner.complete, self._scanner.truncated = complete, truncated
        next(self._parse, None)
        self._writer.finish()
        return self._writer.take()


def _answer(form: AnswerForm, scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    if form.reasons is not None:
        yield from _reasoning(scanner, writer, has_begun=form.reasons)
    begins: tuple[str, ...] = ()
    calls: Calls | None = None
    if form.named is not None:
        calls = partial(arguments_of, name=form.named)
    elif form.tool_format is not None:
        chosen = TOOL_FORMATS[form.tool_format]
        calls, begins = chosen.calls(form.schemas), chosen.begins
        scanner.ends = chosen.marks
    if calls is not None and not begins:
        yield from _call(calls, scanner, writer)
    marks = tuple(dict.fromkeys((*begins, *writer.hidden)))
    while True:
        mark = yield from scanner.until(marks, writer.content)
        if mark is None:
            return
        if calls is not None and mark in begins:
            yield from _call(calls, scanner, writer)
        else:
            yield from scanner.skip(mark)


def _call(calls: Calls, scanner: Scanner, writer: AnswerWriter) -> Parse[None]:
    """Read a call, or at least a character of its mark, so that no place is tried twice."""
    scanner.mark()
    try:
        yield from calls(scanner, writer)
    except Malformed as error:
        truncated = scanner.truncated and isinstance(error, Unfinished)
        writer.fail(scanner.raw(), truncated=truncated)


def _reasoning(scanner: Scanner, writer: AnswerWriter, *, has_begun: bool) -> Parse[None]:
    blanks: list[str] = []
    yield from scanner.blanks(blanks.append)
    if not (yield from scanner.skip(THINK)) and not has_begun:
        writer.content("".join(blanks))
        return
    writer.reasoning("")
    if (yield from scanner.until((END_OF_THINK,), writer.reasoning)):
        yield from scanner.skip(END_OF_THINK)
