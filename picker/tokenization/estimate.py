"""The pseudo-tokens of a prompt without a tokenizer: its bytes, four to a token.

Two prompts with a common beginning have common first tokens, which is all that a prefix cache
needs. What the bytes of a prompt are:

- chat: the JSON of `tools` (keys sorted) if there are any, then for each message its role and its
  content, a string or a list of blocks and strings, without separators;
- messages (Anthropic): the JSON of `tools`, the texts of `system` but for billing headers, then for
  each message its role and its content; of a tool's use its id, name and input, of its result the
  texts, a line each, and the images;
- completions: the prompt; one prompt for each string of a list; vLLM's gRPC text likewise;
- a batch of chats: one prompt for each of its conversations;
- embeddings and pooling: the input, likewise, or the messages as of a chat;
- SGLang's generate: its text, likewise;
- responses: the JSON of instructions, tools and input; conversations: the JSON of the items;
- lists of integers: real token ids, passed through.
"""

from __future__ import annotations

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
    """Makes pseudo-tokens of decoded bodies. A value."""

    media: MediaTokens

    def prompts(
        self, api: Api, payload: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[Prompt, ...]:
        """The prompts of a request, none of them empty; none if it has no readable prompt."""
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
        return tuple(prompt for prompt in prompts if prompt.tokens)

    def _conversations(
        self, payload: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Iterable[Prompt]:
        """Of a batch; tools and the like are those of all."""
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
    """One prompt for a string or a list of token ids; one for each element of a list of those."""
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
