"""The model's text side, which turns conversations and texts into token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from base.shelves import load_shelf
from worker.api.http.field_errors import refused
from worker.api.http.off_loop import off_loop_when_large
from worker.api.schema.conversation import template_messages
from worker.api.schema.params import ModelLimits
from worker.api.schema.requests import MAX_DOCUMENTS, ChatMessage, ChatRequest, TokenizeRequest
from worker.api.schema.tools import template_tools
from worker.config import SIM_TOKENIZER, ServeConfig
from worker.engine.messages import Vocabulary
from worker.engine.sequences.grammar import GrammarCompiler, Grammars
from worker.errors import RequestError
from worker.tokenizer.chat import ChatTemplate, chat_template_of
from worker.tokenizer.checkpoint import Checkpoint
from worker.tokenizer.tokenizer import Tokenizer, build_tokenizer


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


@dataclass(frozen=True, slots=True)
class TextParts:
    """The tokenizer and chat template of a checkpoint. `vocabulary` is None without an end token: a
    constrained answer could never end.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocabulary: Vocabulary | None

    def of_model(self, config: ServeConfig) -> ModelText:
        return ModelText(
            self.tokenizer,
            self.template,
            ModelLimits(config.api.max_model_len, config.api.vocab_size),
            eos_token_ids=config.engine.eos_token_ids,
            grammars=None if self.vocabulary is None else GrammarCompiler(self.vocabulary),
        )


def build_text(config: ServeConfig, checkpoint: Checkpoint | None) -> TextParts:
    """Build the text side of a checkpoint, or (None) of the simulator. Raises `ModelError`."""
    source = config.chat_template
    if checkpoint is None:
        sim: Any = load_shelf(SIM_TOKENIZER)
        tokenizer: Tokenizer = sim.SimTokenizer()
        source = source or sim.CHAT_TEMPLATE
        template = ChatTemplate(source, bos_token="", eos_token=sim.IM_END, now=datetime.now)
        return TextParts(tokenizer, template, _vocabulary(config, tokenizer))
    if source is not None:
        # The operator's template serves requests with tools too.
        checkpoint = replace(checkpoint, chat_template=source, tool_chat_template=None)
    tokenizer = build_tokenizer(checkpoint)
    chat_template = chat_template_of(checkpoint, now=datetime.now)
    return TextParts(tokenizer, chat_template, _vocabulary(config, tokenizer))


def _vocabulary(config: ServeConfig, tokenizer: Tokenizer) -> Vocabulary | None:
    size = config.api.vocab_size
    ends = [token for token in config.engine.eos_token_ids if token < size]
    if not ends:
        return None
    # Tokenizers may have special tokens without an embedding, which are never drawn.
    special_ids = sorted({*tokenizer.special_ids, *ends} & set(range(size)))
    return Vocabulary([tokenizer.token_bytes(i) for i in range(size)], special_ids, ends)
