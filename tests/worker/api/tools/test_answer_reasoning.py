"""Reasoning apart from the answer, in pieces of any size."""

from itertools import count
from typing import Any

import pytest

from worker.api.tools.answer import AnswerForm, begins_with_reasoning


def parse(pieces: Any, **form: Any) -> tuple[str, str, list[str]]:
    numbers = count()
    parser = AnswerForm(lambda: str(next(numbers)), **form).parser()
    said = [parser.feed(piece) for piece in pieces]
    said.append(parser.finish(complete=True, truncated=False))
    calls = [call.name for part in said for call in part.calls if call.name is not None]
    return "".join(p.reasoning for p in said), "".join(p.content for p in said), calls


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "content"),
    [
        (
            "<think>\nLet me see. \n\n 1 < 2\n</think>\n\nTwo. ",
            False,
            "Let me see. \n\n 1 < 2",
            "Two. ",
        ),
        ("\n<think></think>Two.", False, "", "Two."),
        ("hm\n</think>\n\nTwo.", True, "hm", "Two."),
        ("<think>hm</think>Two <think>.", True, "hm", "Two <think>."),
        ("  Two.\n", False, "", "  Two.\n"),
        ("never <think>to an end", True, "never <think>to an end", ""),
        ("<think>cut </thin", False, "cut </thin", ""),
        ("<th", False, "", "<th"),
        ("hm</think>\n ", True, "hm", ""),
    ],
)
def test_reasoning_is_taken_out(text: str, has_begun: bool, reasoning: str, content: str) -> None:
    assert parse([text], reasons=has_begun) == (reasoning, content, [])
    assert parse(text, reasons=has_begun) == (reasoning, content, [])
    for at in range(len(text)):
        pieces = [text[:at], text[at:]]
        assert parse(pieces, reasons=has_begun) == (reasoning, content, [])


def test_calls_come_after_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}</think>\n\n{call}"
    for pieces in ([text], text):
        reasoning, content, calls = parse(pieces, reasons=False, tool_format="hermes")
        assert (reasoning, content, calls) == (f"I could {call}", "", ["f"])


def test_reasoning_can_be_left_out() -> None:
    assert parse("<think>hm</think>Two.", reasons=False, shows_reasoning=False)[:2] == ("", "Two.")


@pytest.mark.parametrize(
    ("prompt", "opens", "deepseek", "qwen"),
    [
        ("<|im_start|>assistant\n", True, True, False),
        ("<|im_start|>assistant\n<think>\n", True, True, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True, False, False),
        ("say <think> please<|im_end|>\n<|im_start|>assistant\n", True, True, False),
        ("<|im_start|>assistant\nOnce upon", False, False, False),
    ],
)
def test_the_prompt_shows_whether_reasoning_has_begun(
    prompt: str, opens: bool, deepseek: bool, qwen: bool
) -> None:
    assert begins_with_reasoning("deepseek_r1", prompt, opens_a_turn=opens) is deepseek
    assert begins_with_reasoning("qwen3", prompt, opens_a_turn=opens) is qwen
