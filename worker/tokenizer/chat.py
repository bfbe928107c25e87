"""Chat messages → prompt text, through the model's own Jinja template in a sandbox.

A template comes with a model file and its input from anybody, so it runs in Jinja's immutable
sandbox, with the few extras Hugging Face templates rely on: `raise_exception`, `strftime_now`,
`tojson` that does not escape for HTML, and loop controls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.errors import ModelError, RequestError


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """One model's template, compiled once. `now` is the clock behind `strftime_now`."""

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime]
    ) -> None:
        """Compile; raise `ModelError` when the template is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._source = source

    @property
    def source(self) -> str:
        """The template as the model has it."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. `variables` are the client's own template variables; they
        cannot replace the messages. Raises `RequestError` (400) when the template refuses them.
        """
        values = {**(variables or {}), **self._tokens}
        values["messages"] = messages
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            reason = f"the chat template refused the messages: {error}"
            raise RequestError(reason, param="messages") from error
