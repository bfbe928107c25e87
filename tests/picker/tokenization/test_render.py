"""Bodies become requests to render routes, and their answers become prompts."""

from struct import pack
from typing import Any

import pytest

from picker.tokenization.prompt_stream import Prompt
from picker.tokenization.render import RenderQuestion, prompts_of, question_of
from picker.types import Api, MultiModalFeature, ParsedBody

HI = {"role": "user", "content": "hi"}
NO_BLOCKS: dict[str, Any] = {"role": "user", "content": []}
BLOCKS = {
    "role": "user",
    "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "x"}],
}


@pytest.mark.parametrize(
    ("api", "payload", "route", "expected", "has_blocks"),
    [
        (
            *(Api.COMPLETIONS, {"model": "alias", "prompt": ["a"], "x": 1}),
            *("completions", {"prompt": ["a"], "x": 1}, False),
        ),
        (Api.VLLM_GRPC, {"prompt": "a"}, "completions", {"prompt": "a"}, False),
        (
            *(Api.CHAT_COMPLETIONS, {"messages": [HI, NO_BLOCKS], "tools": []}),
            *("chat/completions", {"messages": [HI, NO_BLOCKS], "tools": []}, False),
        ),
        (
            *(Api.CHAT_COMPLETIONS, {"messages": [HI, BLOCKS]}),
            *("chat/completions", {"messages": [HI, BLOCKS]}, True),
        ),
        (
            *(Api.MESSAGES, {"messages": [HI], "system": "s", "max_tokens": 5}),
            "chat/completions",
            {"messages": [{"role": "system", "content": "s"}, HI]},
            False,
        ),
    ],
)
def test_the_question_is_the_body_with_the_base_model(
    api: Api, payload: dict[str, Any], route: str, expected: dict[str, Any], has_blocks: bool
) -> None:
    question = RenderQuestion(f"/v1/{route}/render", {"model": "m", **expected}, has_blocks)
    assert question_of(ParsedBody(api, "alias", payload=payload), "m") == question


@pytest.mark.parametrize(
    ("api", "payload"),
    [
        (Api.EMBEDDINGS, {"input": "a"}),
        (Api.RESPONSES, {"input": "a"}),
        (Api.CONVERSATIONS, {"items": [1]}),
        (Api.IMAGES, {"prompt": "a"}),
        (Api.RAW, None),
    ],
)
def test_other_apis_have_no_question(api: Api, payload: dict[str, Any] | None) -> None:
    assert question_of(ParsedBody(api, "alias", payload=payload), "m") is None


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
    with pytest.raises(ValueError, match=r"route returned|features"):
        prompts_of(answer)
