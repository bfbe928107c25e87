"""The model's text: conversations and texts → token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema.params import ModelLimits
from worker.api.schema.prompts import check_documents, check_prompt_chars, template_messages
from worker.api.schema.requests import ChatMessage, Tool
from worker.api.schema.tools import template_tools
from worker.engine.sequences.grammar import Grammars
from worker.errors import RequestError
from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.tokenizer import Tokenizer


class Encode(Protocol):
    """`Tokenizer.encode`."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class ChatOptions(Protocol):
    """The part of a request that the chat template sees besides the messages."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def documents(self) -> list[dict[str, Any]] | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, object] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def tools(self) -> list[Tool] | None: ...


def opens_a_turn(options: ChatOptions) -> bool:
    """Whether the prompt ends with the start of an assistant's turn: by default, unless the last
    message is to be continued.
    """
    if options.continue_final_message and options.add_generation_prompt:
        raise RequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    if options.add_generation_prompt is None:
        return not options.continue_final_message
    return options.add_generation_prompt


@dataclass(frozen=True, slots=True)
class ModelText:
    """The model's text: tokenizer, template (None: not a chat model), limits, and the tokens that
    end a sequence, the model's own one first. `prompt_encoder` encodes prompts in the tokenizer's
    place. `grammars` checks what answers must match; None: none can be constrained.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: ModelLimits
    eos_token_ids: tuple[int, ...] = ()
    prompt_encoder: Encode | None = None
    grammars: Grammars | None = None

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def takes_system_turns(self) -> bool:
        """True if a conversation may have messages of the system anywhere."""
        return self.template is None or self.template.takes_system_turns

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        """The prompt of a conversation."""
        if self.template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions", param="messages"
            )
        check_documents(options.documents)
        variables = dict(options.chat_template_kwargs or {})
        if options.reasoning_effort is not None:
            variables["reasoning_effort"] = options.reasoning_effort
        objects = True
        if any(message.tool_calls for message in messages):
            objects = self.template.takes_argument_objects
        return self.template.render(
            template_messages(messages, argument_objects=objects),
            add_generation_prompt=opens_a_turn(options),
            continue_final_message=bool(options.continue_final_message),
            tools=template_tools(options.tools),
            documents=options.documents or None,
            variables=variables,
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Refuses a hopelessly long one (400)."""
        (ids,) = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of several texts, in a thread if they are long together."""
        for text in texts:
            check_prompt_chars(text, self.limits)

        def encode() -> list[list[int]]:
            one = self.prompt_encoder or self.tokenizer.encode
            return [one(text, add_special_tokens=add_special_tokens) for text in texts]

        return await off_loop_when_large(sum(map(len, texts)), encode)

    async def decode_all(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token ids, control tokens included; in a thread if they are many together."""

        def decode() -> list[str]:
            one = self.tokenizer.decode
            return [one(ids, skip_special_tokens=False) for ids in prompts]

        return await off_loop_when_large(sum(map(len, prompts)), decode)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a short text, without the model's prefix."""
        return self.tokenizer.encode(text, add_special_tokens=False)
