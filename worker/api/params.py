"""Checked request fields → what the engine and the detokenizer need. Pure but for the `rng`.

Ranges and defaults are those of vLLM 0.32's OpenAI server; a value outside is a 400 with `param`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker.api.schema import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    ChatMessage,
    GenerationFields,
)
from worker.errors import RequestError
from worker.types import SamplingParams

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01  # a smaller one overflows the softmax of half-precision logits
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class TextParams:
    """How tokens become text: what the API process does itself."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    max_model_len: int
    vocab_size: int


def text_params(request: GenerationFields) -> TextParams:
    """Stop strings and the like."""
    return TextParams(
        stop=_stop_strings(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
    for string in strings:
        if not string:
            raise RequestError("stop cannot contain an empty string", param="stop")
        if len(string.encode("utf-8", "replace")) > MAX_STOP_BYTES:
            raise RequestError(f"a stop string has at most {MAX_STOP_BYTES} bytes", param="stop")
    return strings


def sampling_params(
    request: GenerationFields, max_tokens: int, limits: ModelLimits, rng: random.Random
) -> SamplingParams:
    """Validate and default the sampling fields. `rng` draws the seed a request does not give."""
    temperature = _in_range(request, "temperature", 1.0, 0.0, 2.0)
    greedy = temperature < GREEDY_BELOW
    top_p = _in_range(request, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise RequestError("top_p must be in (0, 1], got 0", param="top_p")
    top_k = request.top_k or 0
    if top_k < -1:
        raise RequestError(f"top_k must be -1 (off), 0 (off) or more, got {top_k}", param="top_k")
    min_tokens = request.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise RequestError(
            f"min_tokens must be in [0, max_tokens = {max_tokens}], got {min_tokens}",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else max(temperature, MIN_TEMPERATURE),
        top_p=1.0 if greedy else top_p,
        top_k=0 if greedy else min(max(top_k, 0), limits.vocab_size),
        seed=_seed(request.seed, rng),
        min_tokens=min_tokens,
        stop_token_ids=_stop_token_ids(request.stop_token_ids, limits.vocab_size),
        ignore_eos=bool(request.ignore_eos),
    )


def _in_range(
    request: GenerationFields, name: str, default: float, low: float, high: float
) -> float:
    value = getattr(request, name)
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {value}", param=name)
    return float(value)


def _seed(seed: int | None, rng: random.Random) -> int:
    if seed is None or seed == -1:
        return rng.getrandbits(63)
    if not -_INT64 <= seed < _INT64:
        raise RequestError("seed must fit into 64 bits", param="seed")
    return seed & (_INT64 - 1)


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    for token_id in ids or ():
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids must be in [0, {vocab_size}), got {token_id}",
                param="stop_token_ids",
            )
    return tuple(ids or ())


def requested_max_tokens(
    request: GenerationFields, max_completion_tokens: int | None, limits: ModelLimits
) -> int | None:
    """The limit the client set, checked; None when it set none."""
    if max_completion_tokens is not None:
        name, value = "max_completion_tokens", max_completion_tokens
    elif request.max_tokens is not None:
        name, value = "max_tokens", request.max_tokens
    else:
        return None
    if value < 1:
        raise RequestError(f"{name} must be at least 1, got {value}", param=name)
    if value > limits.max_model_len:
        raise RequestError(
            f"{name}={value} cannot be greater than max_model_len={limits.max_model_len}."
            " Please request fewer output tokens.",
            param=name,
        )
    return value


def check_prompt_chars(text: str, limits: ModelLimits) -> None:
    """Refuse a hopelessly long text before it is tokenized: no tokenizer averages 16 bytes a
    token over a whole context.
    """
    if len(text) > 16 * limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" prompt contains {len(text)} characters, which is more than that.",
            param="input_text",
        )


def room_for_output(num_prompt_tokens: int, limits: ModelLimits) -> int:
    """Tokens that can follow a prompt; a prompt that leaves none is refused."""
    if num_prompt_tokens == 0:
        raise RequestError("The decoder prompt cannot be empty", param="prompt")
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" prompt contains {num_prompt_tokens} input tokens, which leaves no room for an"
            " answer. Please reduce the length of the prompt.",
            param="input_tokens",
        )
    return room


def check_cache_salt(salt: str | None) -> None:
    """The salt separates tenants' prefix caches, so an empty one is a mistake, not a default."""
    if salt is None:
        return
    if not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or set(salt) & set("@/\\\0"):
        raise RequestError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters, none of @ / \\ NUL",
            param="cache_salt",
        )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the chat template sees them: content is always one string (text parts joined by
    line breaks).
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages must have 1 to {MAX_MESSAGES} entries", param="messages")
    rendered = []
    for n, message in enumerate(messages):
        place = f"messages[{n}]"
        if message.role not in _ROLES:
            raise RequestError(
                f"{place}.role must be one of {', '.join(sorted(_ROLES))}, got {message.role!r}",
                param=f"{place}.role",
            )
        _refuse_unsupported_parts(message, place)
        entry: dict[str, Any] = {"role": message.role, "content": _content(message, place)}
        if message.name is not None:
            entry["name"] = message.name
        rendered.append(entry)
    return rendered


def _refuse_unsupported_parts(message: ChatMessage, place: str) -> None:
    for name in ("tool_calls", "tool_call_id", "function_call", "refusal", "audio"):
        if getattr(message, name) not in (None, [], {}):
            raise RequestError(f"{place}.{name} is not supported yet", param=f"{place}.{name}")


def _content(message: ChatMessage, place: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for n, part in enumerate(message.content):
        if part.type not in ("text", "input_text") or part.text is None:
            raise RequestError(
                f"{place}.content[{n}]: only text parts are supported yet, got {part.type!r}",
                param=f"{place}.content[{n}].type",
            )
        texts.append(part.text)
    return "\n".join(texts)


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The one or several prompts of a text completion: text or token ids each."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt cannot be empty", param="prompt")
    kinds = {type(p) for p in prompt}
    if kinds == {int}:
        return [[p for p in prompt if isinstance(p, int)]]
    if kinds not in ({str}, {list}):
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such"
            " lists; not a mixture",
            param="prompt",
        )
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    return [p for p in prompt if not isinstance(p, int)]


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Ids a client gives must exist; the engine trusts them."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        raise RequestError(
            f"Token ids of a prompt must be in [0, {limits.vocab_size})", param="prompt"
        )
