"""Which parsers the answers to a chat go through."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from worker.api.generate.text import ModelText, opens_a_turn
from worker.api.schema.constraints import after_reasoning
from worker.api.schema.requests import ChatRequest
from worker.api.schema.tools import ToolUse, tool_use
from worker.api.tools.answer import (
    END_OF_THINK,
    REASONING_MARKS,
    TOOL_FORMATS,
    AnswerForm,
    begins_with_reasoning,
    format_of_template,
)
from worker.config import ApiConfig
from worker.errors import RequestError


class AnswerForms:
    """Knows how the model writes its calls and its reasoning, and which of the marks that it uses
    are control tokens.
    """

    def __init__(self, config: ApiConfig, text: ModelText) -> None:
        self._auto = config.enable_auto_tool_choice
        self._tools = config.tool_call_parser
        self._reasoning = config.reasoning_parser
        if self._tools is None and text.template is not None and text.template.shows_tools:
            self._tools = format_of_template(text.template.tool_source)
        of_model = None if self._tools is None else TOOL_FORMATS[self._tools]
        self._new_id = _short_id if of_model is not None and of_model.short_ids else _long_id
        self._tokenizer = text.tokenizer

    @cached_property
    def _special(self) -> dict[str, int]:
        spelling = self._tokenizer.token_text
        return {spelling(i): i for i in self._tokenizer.special_ids}

    def form_of(
        self, request: ChatRequest, prompt: str
    ) -> tuple[AnswerForm | None, frozenset[int]]:
        """What to look for in the answers to a prompt, and the control tokens that must be in the
        text for it; None where the text is the answer. Raises `RequestError` when the choice of
        tools cannot be met.
        """
        use = tool_use(request)
        if use is not None and use.choice == "none":
            use = None
        if use is None and self._reasoning is None:
            return None, frozenset()
        schemas: Mapping[str, Mapping[str, Any]] = {}
        chosen: str | None = None
        marks: set[str] = set()
        if use is not None:
            schemas, chosen = use.schemas, self._chosen(use)
            marks.update(TOOL_FORMATS[chosen].marks)
        reasons: bool | None = None
        if self._reasoning is not None:
            opens = opens_a_turn(request)
            reasons = begins_with_reasoning(self._reasoning, prompt, opens_a_turn=opens)
            marks.update(REASONING_MARKS)
        special = marks & self._special.keys()
        form = AnswerForm(
            self._new_id,
            schemas=schemas,
            tool_format=chosen,
            named=None if use is None else use.named,
            only_one=use is not None and not use.parallel,
            reasons=reasons,
            shows_reasoning=request.include_reasoning is not False,
            hidden=() if request.skip_special_tokens is False else tuple(sorted(special)),
        )
        return form, frozenset(self._special[mark] for mark in special)

    def grammar_of(
        self, grammar: str, form: AnswerForm | None, request: ChatRequest, prompt: str
    ) -> str:
        """The grammar of the whole of an answer which, once it has reasoned, matches `grammar`."""
        if form is None or form.reasons is None:
            return grammar
        has_reasoned = prompt.rstrip().endswith(END_OF_THINK) or not opens_a_turn(request)
        if has_reasoned and not form.reasons:
            return grammar
        return after_reasoning(grammar, self._special, is_certain=form.reasons)

    def _chosen(self, use: ToolUse) -> str:
        """How the calls will be written; those that an answer has to have are in plain JSON."""
        if use.choice != "auto":
            return "json"
        if self._tools is None or not self._auto:
            raise RequestError(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be'
                " set, where the chat template does not show how the model writes calls; set"
                " tool_choice to 'none' otherwise"
            )
        return self._tools


def _long_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def _short_id() -> str:
    return secrets.token_hex(5)[:9]
