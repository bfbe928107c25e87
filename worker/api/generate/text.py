"""The model's text side, which turns conversations and texts into token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from worker.api.http.field_errors import refused
from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema.conversation import template_messages
from worker.api.schema.params import ModelLimits
from worker.api.schema.requests import MAX_DOCUMENTS, ChatMessage, ChatRequest, TokenizeRequest
from worker.api.schema.tools import template_tools
from worker.engine.sequences.grammar import Grammars
from worker.errors import RequestError
from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.tokenizer import Tokenizer


class Encode(Protocol):
    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


ChatOptions = ChatRequest | TokenizeRequest


def opens_a_turn(options: ChatOptions) -> bool:
    """Return whether the prompt ends with the start of an assistant's turn."""
    if options.continue_final_message and options.add_generation_prompt:
        raise RequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    if options.add_generation_prompt is None:
        return not options.continue_final_message
    return options.add_generation_prompt


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    ids: list[int]
    opens_turn: bool


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's text side. `template` None: it does not chat; `grammars` None: no constraints."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: ModelLimits
    eos_token_ids: tuple[int, ...] = ()
    prompt_encoder: Encode | None = None
    grammars: Grammars | None = None

    @property
    def takes_system_turns(self) -> bool:
        return self.template is None or self.template.takes_system_turns

    async def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions,
        *,
        add_special_tokens: bool = False,
    ) -> ChatPrompt:
        """Render and encode a conversation; by default, its template writes the model's prefix."""
        if self.template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions", param="messages"
            )
        if len(options.documents or ()) > MAX_DOCUMENTS:
            raise refused("documents", f"takes at most {MAX_DOCUMENTS}")
        variables = dict(options.chat_template_kwargs or {})
        if options.reasoning_effort is not None:
            variables["reasoning_effort"] = options.reasoning_effort
        objects = True
        # Probing the template costs two renders, once, and only such conversations need it.
        if any(message.tool_calls for message in messages):
            objects = self.template.takes_argument_objects
        opens_turn = opens_a_turn(options)
        turns = template_messages(messages, argument_objects=objects)
        text = self.template.render(
            turns,
            add_generation_prompt=opens_turn,
            continue_final_message=bool(options.continue_final_message),
            tools=template_tools(options.tools) if options.tools else None,
            documents=options.documents or None,
            variables=variables,
        )
        ids = await self.encode(text, add_special_tokens=add_special_tokens)
        return ChatPrompt(text, ids, opens_turn)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        [ids] = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        for text in texts:
            self._check_length(text)
        # The render routes record offsets on the way.
        encode = self.prompt_encoder or self.tokenizer.encode
        one = partial(encode, add_special_tokens=add_special_tokens)
        return await off_loop_when_large(sum(map(len, texts)), partial(list, map(one, texts)))

    async def decode_all(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Decode sequences, with their control tokens; in a thread if they are long together."""
        one = partial(self.tokenizer.decode, skip_special_tokens=False)
        return await off_loop_when_large(sum(map(len, prompts)), partial(list, map(one, prompts)))

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit: no tokenizer averages 16 characters per token."""
        if len(text) > 16 * self.limits.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.limits.max_model_len} tokens."
                f" However, your prompt contains {len(text)} characters, which is more than that.",
                param="input_text",
            )
