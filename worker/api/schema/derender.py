"""What `/inference/v1/generate` answered, to be made into the answer that the client asked for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from worker.api.schema.requests import (
    MAX_PROMPTS,
    MAX_REQUEST_ID_CHARS,
    ChatRequest,
    CompletionRequest,
    TokenId,
    only,
)
from worker.types import TokenLogprobs

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class TokenEntry(msgspec.Struct):
    """A token by its id, `token_id:N`, and its log probability; `bytes` say nothing."""

    token: Annotated[str, msgspec.Meta(pattern=r"^token_id:[0-9]{1,18}$")]
    logprob: float
    bytes: Any = None
    top_logprobs: list[TokenEntry] | None = None

    @property
    def token_id(self) -> int:
        """The N."""
        return int(self.token.removeprefix("token_id:"))

    def logprobs(self) -> TokenLogprobs:
        """As the engine tells it; the rank among the likeliest that are listed."""
        others = self.top_logprobs or []
        return TokenLogprobs(
            (self.token_id, *(other.token_id for other in others)),
            (self.logprob, *(other.logprob for other in others)),
            1 + sum(other.logprob > self.logprob for other in others),
        )


class TokenEntries(msgspec.Struct):
    """`logprobs` of a choice."""

    content: list[TokenEntry] | None = None


class GeneratedChoice(msgspec.Struct):
    """One continuation, in token ids. What is not read may be anything."""

    token_ids: list[TokenId] | None = None
    logprobs: TokenEntries | None = None
    finish_reason: Literal["stop", "length", "abort", "repetition"] | None = None
    stop_reason: str | int | None = None


class GenerateAnswer(msgspec.Struct):
    """Answer of `/inference/v1/generate`, ours or vLLM's, whole; of which only these are read."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
    choices: Annotated[list[GeneratedChoice], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class DerenderChatRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/chat/completions/derender`. `chat_request` is the body of the chat:
    without it nothing is known of tools and stop strings, and no parser looks for calls.
    """

    generate_response: GenerateAnswer
    model: str | None = None
    prompt_tokens: _Tokens | None = None
    chat_request: ChatRequest | None = None
    stream: Annotated[Any, only(False)] = None


class DerenderCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/completions/derender`: an answer and a number of tokens for each prompt."""

    generate_responses: Annotated[
        list[GenerateAnswer], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
    ]
    model: str | None = None
    prompt_tokens: list[_Tokens] | None = None
    completion_request: CompletionRequest | None = None
    stream: Annotated[Any, only(False)] = None
