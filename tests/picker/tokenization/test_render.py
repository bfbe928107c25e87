"""Bodies become requests to render routes, and their answers become prompts."""

from __future__ import annotations

from struct import pack
from typing import Any

import pytest

from picker.tokenization.prompt_stream import Prompt
from picker.tokenization.render import RenderQuestion, prompts_of, question_of
from picker.types import Api, MultiModalFeature, ParsedBody

HI = {"role": "user", "content": "hi"}
BLOCKS = {
    "role": "user",
    "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "x"}],
}


@pytest.mark.parametrize(
    ("api", "payload", "expected"),
    [
        (
            Api.COMPLETIONS,
            {"model": "alias", "prompt": ["a"], "x": 1},
            RenderQuestion(
                "/v1/completions/render", {"model": "m", "prompt": ["a"], "x": 1}, has_blocks=False
            ),
        ),
        (
            Api.VLLM_GRPC,
            {"prompt": "a"},
            RenderQuestion(
                "/v1/completions/render", {"model": "m", "prompt": "a"}, has_blocks=False
            ),
        ),
        (
            Api.CHAT_COMPLETIONS,
            {"messages": [HI, {"role": "user", "content": []}], "tools": []},
            RenderQuestion(
                "/v1/chat/completions/render",
                {"model": "m", "messages": [HI, {"role": "user", "content": []}], "tools": []},
                has_blocks=False,
            ),
        ),
        (
            Api.CHAT_COMPLETIONS,
            {"messages": [HI, BLOCKS]},
            RenderQuestion(
                "/v1/chat/completions/render",
                {"model": "m", "messages": [HI, BLOCKS]},
                has_blocks=True,
            ),
        ),
        (
            Api.MESSAGES,
            {"messages": [HI], "system": "s", "max_tokens": 5},
            RenderQuestion(
                "/v1/chat/completions/render",
                {"model": "m", "messages": [{"role": "system", "content": "s"}, HI]},
                has_blocks=False,
            ),
        ),
        (Api.EMBEDDINGS, {"input": "a"}, None),
        (Api.RESPONSES, {"input": "a"}, None),
        (Api.CONVERSATIONS, {"items": [1]}, None),
        (Api.IMAGES, {"prompt": "a"}, None),
        (Api.RAW, None, None),
    ],
)
def test_each_body_becomes_a_question_or_none(
    api: Api, payload: dict[str, Any] | None, expected: RenderQuestion | None
) -> None:
    """The client's body, with the name of the base model; None for other APIs."""
    assert question_of(ParsedBody(api, "alias", payload=payload), "m") == expected


def test_answers_become_prompts_with_their_items() -> None:
    features = {
        "mm_hashes": {"image": ["h"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
    }
    entry = {"token_ids": [1, 2], "features": features, "request_id": "x"}
    prompt = Prompt(pack("<2I", 1, 2), (MultiModalFeature("image", "h", 0, 1),))
    assert prompts_of(entry) == (prompt,)
    assert prompts_of([entry, {"token_ids": [3]}]) == (prompt, Prompt(pack("<I", 3)))


@pytest.mark.parametrize(
    "answer",
    [
        [],
        None,
        "x",
        [1],
        {},
        {"token_ids": []},
        {"token_ids": ["a"]},
        {"token_ids": [1], "features": 1},
    ],
)
def test_other_answers_are_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"route answered|features"):
        prompts_of(answer)
