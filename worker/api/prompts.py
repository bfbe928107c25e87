"""What a request says → the prompts to run: conversations, texts, token ids, and their limits.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from worker.api.params import ModelLimits, invalid
from worker.api.parse import shown
from worker.api.schema import MAX_DOCUMENTS, MAX_MESSAGES, MAX_PROMPTS, ChatMessage
from worker.errors import RequestError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Of a message; only null and empty ones are taken.
UNSUPPORTED_PARTS = ("tool_calls", "tool_call_id", "function_call", "refusal", "audio")


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


def truncated(
    token_ids: list[int], asked: int | None, side: str | None, max_tokens: int, limits: ModelLimits
) -> list[int]:
    """The prompt, cut to `truncate_prompt_tokens`: its end is kept, or with the side "right" its
    beginning. -1 cuts to what leaves room for `max_tokens` in the context.
    """
    if side not in (None, "left", "right"):
        raise invalid("truncation_side", side, "truncation_side must be left or right")
    if asked is None:
        return token_ids
    name = "truncate_prompt_tokens"
    if asked == 0 or asked < -1:
        raise invalid(name, asked, f"{name} must be at least 1, or -1, got {asked}.")
    if asked > limits.max_model_len:
        reason = f"{name} value is greater than max_model_len={limits.max_model_len}."
        raise invalid(name, asked, f"{reason} Please request a smaller truncation size.")
    size = max(1, limits.max_model_len - max_tokens) if asked == -1 else asked
    return token_ids[:size] if side == "right" else token_ids[-size:]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the chat template sees them: content is always one string (text parts joined by
    line breaks).
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages must have 1 to {MAX_MESSAGES} entries", param="messages")
    rendered = []
    for n, message in enumerate(messages):
        place = f"messages[{n}]"
        if message.role not in ROLES:
            raise RequestError(
                f"{place}.role must be one of {', '.join(sorted(ROLES))},"
                f" got '{shown(message.role)}'",
                param=f"{place}.role",
            )
        _refuse_unsupported_parts(message, place)
        entry: dict[str, Any] = {"role": message.role, "content": _content(message, place)}
        if message.name is not None:
            entry["name"] = message.name
        reasoning = _reasoning(message, place)
        if reasoning:
            # Templates read one or the other.
            entry |= {"reasoning": reasoning, "reasoning_content": reasoning}
        rendered.append(entry)
    return rendered


def _refuse_unsupported_parts(message: ChatMessage, place: str) -> None:
    for name in UNSUPPORTED_PARTS:
        if getattr(message, name) not in (None, [], {}):
            raise RequestError(f"{place}.{name} is not supported yet", param=f"{place}.{name}")


def _reasoning(message: ChatMessage, place: str) -> str | None:
    """What an assistant thought before it spoke; if the model sees it is up to the template."""
    names = [n for n in ("reasoning", "reasoning_content") if getattr(message, n)]
    if not names:
        return None
    if message.role != "assistant":
        reason = f"{place}.{names[0]} is only of assistants, not of {message.role}"
        raise RequestError(reason, param=f"{place}.{names[0]}")
    texts: set[str] = {getattr(message, n) for n in names}
    if len(texts) > 1:
        reason = f"{place}.reasoning and {place}.reasoning_content are the same by two names"
        raise RequestError(f"{reason}, and must not differ", param=f"{place}.reasoning")
    return texts.pop()


def _content(message: ChatMessage, place: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for n, part in enumerate(message.content):
        if part.type not in ("text", "input_text") or part.text is None:
            raise RequestError(
                f"{place}.content[{n}]: only text parts are supported yet,"
                f" got '{shown(part.type)}'",
                param=f"{place}.content[{n}].type",
            )
        texts.append(part.text)
    return "\n".join(texts)


def check_documents(documents: Sequence[Mapping[str, object]] | None) -> None:
    """There are at most so many documents for a template to show."""
    if len(documents or ()) > MAX_DOCUMENTS:
        raise RequestError(f"documents takes at most {MAX_DOCUMENTS}", param="documents")


def prompts_of(
    prompt: str | list[str | int | list[int]], limits: ModelLimits | None = None
) -> list[str | list[int]]:
    """The one or several prompts of a text completion: text or token ids each. With `limits`, too
    many token ids are refused by their number, before each is looked at: there may be millions.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt cannot be empty", param="prompt")
    is_ids = isinstance(prompt[0], int)
    if not is_ids and len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    if limits is not None:
        for ids in [prompt] if is_ids else prompt:
            if isinstance(ids, list):
                room_for_output(len(ids), limits)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds not in ({str}, {list}):
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such"
            " lists; not a mixture",
            param="prompt",
        )
    return cast(list[str | list[int]], prompt)


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, name: str = "prompt") -> None:
    """Ids a client gives, or its text stands for (in the field `name`), must be the model's; the
    engine trusts them.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        raise RequestError(f"Token ids of a prompt must be in [0, {limits.vocab_size})", param=name)
