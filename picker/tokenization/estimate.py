"""Estimates the tokens of a prompt without a tokenizer: its bytes, four per pseudo-token.

Prompts with a common prefix have common first tokens, and a prefix cache requires no more. The
bytes of a prompt are, without separators:

- chat: the JSON of `tools` (keys sorted) if present, then the role and content of each message; a
  content is a string or a list of blocks and strings;
- messages (Anthropic): the JSON of `tools`, the texts of `system` without billing headers, then the
  role and content of each message; a `tool_use` adds its id, name and input, a `tool_result` its
  texts, one per line, and its images;
- completions and vLLM's gRPC text: the prompt; a list of strings is one prompt per string;
- a batch of chats: one prompt per conversation;
- embeddings and pooling: the input, as for completions, or the messages, as for chat;
- SGLang's generate: the text, as for completions;
- responses: the JSON of instructions, tools and input; conversations: the JSON of the items.

Lists of integers are real token ids and pass through.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from picker.tokenization.contents import AnthropicBlocks, BlockAdder, OpenAIBlocks, system_text
from picker.tokenization.json_text import json_text
from picker.tokenization.media import MediaTokens
from picker.tokenization.prompt_stream import Prompt, PromptStream, packed_text
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api

_TEXTS = (Api.COMPLETIONS, Api.VLLM_GRPC, Api.GENERATE)
_RESPONSE_PARTS = ("instructions", "tools", "input")


@dataclass(frozen=True, slots=True)
class PromptEstimator:
    """Turns decoded bodies into prompts of pseudo-tokens. Immutable."""

    media: MediaTokens

    def prompts(
        self, api: Api, payload: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[Prompt, ...]:
        """Return the non-empty prompts of a request; () if it has no readable prompt."""
        if api is Api.CHAT_COMPLETIONS or api is Api.MESSAGES:
            prompts: Iterable[Prompt] = (self._conversation(api, payload, headers),)
        elif api in _TEXTS:
            prompts = _texts(payload.get("prompt"))
        elif api is Api.CHAT_BATCH:
            prompts = self._conversations(payload, headers)
        elif api is Api.EMBEDDINGS or api is Api.POOLING:
            has_input = payload.get("input") is not None
            chat = () if has_input else (self._conversation(api, payload, headers),)
            prompts = _texts(payload["input"]) if has_input else chat
        elif api is Api.RESPONSES:
            parts = [{key: payload[key]} for key in _RESPONSE_PARTS if payload.get(key)]
            prompts = (Prompt(packed_text((json_text(parts),))),) if parts else ()
        elif api is Api.CONVERSATIONS:
            items = payload.get("items")
            prompts = (Prompt(packed_text((json_text(items),))),) if items else ()
        else:
            prompts = ()
        return tuple([prompt for prompt in prompts if prompt.tokens])

    def _conversations(
        self, payload: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Iterable[Prompt]:
        """Estimate each conversation of a batch; all share `tools` and the other fields."""
        batch = payload.get("messages")
        for messages in batch if isinstance(batch, list) else ():
            yield self._conversation(Api.CHAT_BATCH, {**payload, "messages": messages}, headers)

    def _conversation(
        self, api: Api, payload: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Prompt:
        stream = PromptStream()
        texts = stream.texts
        if tools := payload.get("tools"):
            texts.append(json_text(tools))
        blocks: BlockAdder = OpenAIBlocks(stream, self.media, headers)
        if api is Api.MESSAGES:
            texts.append(system_text(payload.get("system")))
            blocks = AnthropicBlocks(stream, self.media)
        messages = payload.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if not isinstance(message, dict):
                continue
            role, content = message.get("role"), message.get("content")
            if isinstance(role, str):
                texts.append(role)
            if isinstance(content, str):
                texts.append(content)
            elif isinstance(content, list):
                for block in content:
                    if isinstance(block, dict):
                        blocks.add(block)
                    elif isinstance(block, str):
                        texts.append(block)
        return stream.finish()


def _texts(value: object) -> Iterable[Prompt]:
    """Yield one prompt for a string or a list of token ids; one per element for a list of them."""
    if isinstance(value, str):
        yield Prompt(packed_text((value,)))
    elif (packed := pack_token_ids(value)) is not None:
        yield Prompt(packed)
    elif isinstance(value, list):
        for element in value:
            if isinstance(element, str):
                yield Prompt(packed_text((element,)))
            elif (packed := pack_token_ids(element)) is not None:
                yield Prompt(packed)
