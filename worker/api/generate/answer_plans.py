"""Answer plans: the constraint that an answer must match, and the parsers that read it."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from worker.api.generate.text import ChatPrompt, ModelText
from worker.api.http.field_errors import Field, FieldError
from worker.api.schema.constraints import (
    CALLS,
    Constraint,
    after_reasoning,
    grammar_of,
    unenforceable,
)
from worker.api.schema.parse import refuse_unsupported
from worker.api.schema.requests import (
    ChatRequest,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
    TextFormat,
)
from worker.api.schema.tools import ToolUse, answer_schema, tool_use
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

COMPILE_SECONDS = 10.0  # of a grammar, with the wait for others
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = {f"guided_{kind}": kind for kind in _KINDS[:4]}  # fields of earlier vLLM
_OPTIONS_OF_SCHEMAS = ("whitespace_pattern", "disable_any_whitespace")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`form` is what parsers look for (None: the text is the answer), `shown_ids` are the control
    tokens that the text keeps for the parsers. `constraint` is what the answer matches after its
    reasoning; `reasons` is None if it does not reason first, else whether it is certain to.
    """

    form: AnswerForm | None = None
    shown_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    reasons: bool | None = None


class AnswerPlans:
    def __init__(self, config: ApiConfig, text: ModelText) -> None:
        self._auto = config.enable_auto_tool_choice
        self._tools = config.tool_call_parser
        self._reasoning = config.reasoning_parser
        # The flag wins; without it the template shows how the model was trained to call.
        if self._tools is None and text.template is not None and text.template.shows_tools:
            self._tools = format_of_template(text.template.tool_source)
        of_model = None if self._tools is None else TOOL_FORMATS[self._tools]
        self._short_ids = of_model is not None and of_model.short_ids
        self._tokenizer = text.tokenizer
        self._grammars = text.grammars

    @cached_property
    def _special(self) -> dict[str, int]:
        spelling = self._tokenizer.token_text
        return {spelling(i): i for i in self._tokenizer.special_ids}

    def of_chat(self, request: ChatRequest, prompt: ChatPrompt) -> AnswerPlan:
        """Plan a chat's answer. Raises `RequestError` if fields conflict or cannot be met."""
        use = None
        if request.tools or request.tool_choice is not None:
            use = tool_use(request)
        # The template still shows the tools; the answer stays text.
        if use is not None and use.choice == "none":
            use = None
        constraint = constraint_of(request, use)
        if use is None and self._reasoning is None:
            return AnswerPlan(constraint=constraint)
        form, shown_ids = self._form(request, prompt, use)
        if constraint is None:
            return AnswerPlan(form, shown_ids)
        reasons = form.reasons
        # The constraint begins behind the reasoning, if the answer reasons at all.
        has_reasoned = prompt.text.rstrip().endswith(END_OF_THINK) or not prompt.opens_turn
        if has_reasoned and not reasons:
            reasons = None
        parsed = form if constraint.field == CALLS else form.without_calls()
        return AnswerPlan(parsed, shown_ids, constraint, reasons)

    def _form(
        self, request: ChatRequest, prompt: ChatPrompt, use: ToolUse | None
    ) -> tuple[AnswerForm, frozenset[int]]:
        schemas: Mapping[str, Mapping[str, Any]] = {}
        chosen: str | None = None
        marks: set[str] = set()
        if use is not None:
            schemas, chosen = use.schemas, self._format(use)
            marks.update(TOOL_FORMATS[chosen].marks)
        reasons: bool | None = None
        if self._reasoning is not None:
            opens = prompt.opens_turn
            reasons = begins_with_reasoning(self._reasoning, prompt.text, opens_a_turn=opens)
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

    def _new_id(self) -> str:
        return (
            secrets.token_hex(5)[:9]  # Mistral's templates take exactly nine
            if self._short_ids
            else f"chatcmpl-tool-{secrets.token_hex(16)}"
        )

    def _format(self, use: ToolUse) -> str:
        # An answer that must be a call is constrained to JSON, whatever the model writes by itself.
        if use.choice != "auto":
            return "json"
        if self._tools is None or not self._auto:
            raise RequestError(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be'
                " set, where the chat template does not show how the model writes calls; set"
                " tool_choice to 'none' otherwise"
            )
        return self._tools

    async def grammar(self, plan: AnswerPlan) -> str | None:
        """Return the grammar of an answer, if any. It is compiled here only to find its errors."""
        constraint = plan.constraint
        if constraint is None:
            return None
        if self._grammars is None:
            reason = "this model has no end token, so no answer would end"
            raise unenforceable(constraint.field, reason)
        # Large schemas take long to rewrite.
        text = await asyncio.to_thread(grammar_of, constraint)
        if plan.reasons is not None:
            text = after_reasoning(text, self._special, is_certain=plan.reasons)
        compiling = asyncio.wrap_future(self._grammars.compile(text))
        # Not `wait_for`, which cancels: other requests may share this compilation.
        await asyncio.wait({compiling}, timeout=COMPILE_SECONDS)
        if not compiling.done():
            reason = f"it takes more than {COMPILE_SECONDS:g} s to compile"
            raise unenforceable(constraint.field, reason)
        error = compiling.result().error
        if error is not None:
            raise unenforceable(constraint.field, error)
        return text


def constraint_of(request: GenerationFields, use: ToolUse | None = None) -> Constraint | None:
    """Return what the answer must match. Raises `RequestError` if several fields ask for it."""
    found: list[Constraint] = []
    if request.structured_outputs is not None:
        found.append(_structured(request.structured_outputs))
    found += _formatted(request)
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            found.append(Constraint(StructuredOutputs(**{kind: value}), name))
    calls = None if use is None else answer_schema(use)
    if calls is not None:
        found.append(Constraint(StructuredOutputs(json=calls), CALLS))
    if len(found) > 1:
        names: list[str] = []
        for each in found:
            names += ("` and `", Field(each.field))
        reason = "` constrain the same answer; send one of them"
        raise FieldError("`", *names[1:], reason, param=found[1].field)
    # The grammar forces the end token when the answer is complete.
    if found and request.ignore_eos:
        asked = Field(found[0].field)
        reason = "`ignore_eos` cannot be combined with `"
        raise FieldError(reason, asked, "`: its answer has an end", param="ignore_eos")
    return found[0] if found else None


def _structured(outputs: StructuredOutputs) -> Constraint:
    refuse_unsupported(outputs, "structured_outputs.")
    asked = [kind for kind in _KINDS if getattr(outputs, kind) not in (None, False)]
    if len(asked) != 1:
        name = "structured_outputs"
        got = f"got {', '.join(asked)}" if asked else "got none"
        reason = f" takes exactly one of {', '.join(_KINDS)}; {got}"
        raise FieldError(Field(name), reason, param=name)
    field = f"structured_outputs.{asked[0]}"
    for option in _OPTIONS_OF_SCHEMAS:
        if getattr(outputs, option) and asked[0] not in ("json", "json_object"):
            reason = f"`{option}` is about JSON; it cannot be combined with `{field}`"
            raise RequestError(reason, param=f"structured_outputs.{option}")
    return Constraint(outputs, field)


def _formatted(request: GenerationFields) -> list[Constraint]:
    form = request.response_format
    if isinstance(form, JsonObjectFormat):
        return [Constraint(StructuredOutputs(json_object=True), "response_format")]
    if isinstance(form, JsonSchemaFormat):
        outputs = StructuredOutputs(json=form.json_schema.schema)
        return [Constraint(outputs, "response_format.json_schema.schema")]
    if isinstance(form, StructuralTagFormat):
        tag = msgspec.json.encode(form).decode()
        return [Constraint(StructuredOutputs(structural_tag=tag), "response_format")]
    assert form is None or isinstance(form, TextFormat)  # noqa: S101 (there are no others)
    return []
