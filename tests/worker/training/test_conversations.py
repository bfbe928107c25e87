"""Conversations are given and sampled tokens within the tokens of the template."""

import random
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, cast

import pytest

from tests.depth import worlds
from worker.sim.tokenizer import CHAT_TEMPLATE, IM_END
from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.tokenizer import Tokenizer
from worker.training.conversations import (
    LONGEST_CONVERSATION,
    Continuation,
    Conversation,
    ConversationMaker,
    Given,
    chat_frame,
    follow_up,
    open_prompt,
)


class Letters:
    vocab_size = 400
    _MARKS = ("<|im_start|>", IM_END)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """256 and 257 are the marks."""
        assert not add_special_tokens
        parts = re.split(f"({'|'.join(map(re.escape, self._MARKS))})", text)
        return [
            token
            for part in parts
            for token in (
                [256 + self._MARKS.index(part)] if part in self._MARKS else map(ord, part)
            )
        ]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self._MARKS[t - 256] if t in (256, 257) else chr(t) for t in token_ids)


TOKENIZER = cast(Tokenizer, Letters())
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, bos_token="", eos_token=IM_END, now=datetime.now)
(END,) = TOKENIZER.encode(IM_END, add_special_tokens=False)


def words(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def maker(chats: bool = True) -> ConversationMaker:
    frame = chat_frame(TOKENIZER, TEMPLATE) if chats else None
    return ConversationMaker(TOKENIZER, frame, (), (END,))


def follow(program: Conversation, answers: Iterable[tuple[int, ...]]) -> tuple[list[Any], bool]:
    actions: list[Any] = []
    waiting, drawn = iter(answers), None
    while True:
        try:
            action = program.send(drawn)
        except StopIteration as end:
            return actions, end.value
        actions.append(action)
        drawn = next(waiting) if isinstance(action, Continuation) else None


def said(actions: Iterable[Any], answers: Iterable[tuple[int, ...]]) -> str:
    waiting = iter(answers)
    tokens = [
        token
        for action in actions
        for token in (action.token_ids if isinstance(action, Given) else next(waiting))
    ]
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def test_a_conversation_reads_as_the_template_would_write_it() -> None:
    seen = set()
    for number in range(30):
        rng = random.Random(number)
        answers = [(*words("a fair question"), END), (*words("and an answer " * 9), END)] * 2
        actions, is_used = follow(maker().conversation(rng), answers)
        text = said(actions, answers)
        turns = sum(isinstance(a, Continuation) and a.is_target for a in actions)
        own_prompt = any(isinstance(a, Continuation) and not a.is_target for a in actions)
        seen.add((turns, own_prompt))
        turns = [part.partition("\n")[2] for part in text.split("<|im_start|>") if part]
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": part.strip().removesuffix(IM_END)}
            for i, part in enumerate(turns)
        ]
        expected = TEMPLATE.render(messages, add_generation_prompt=False)
        assert text == expected.strip()
        assert is_used
    assert seen == {(1, False), (1, True), (2, False), (2, True)}


def test_an_answer_that_was_cut_off_has_no_second_turn() -> None:
    for number in range(30):
        answers = [words("long " * 30)] * 4
        actions, _ = follow(maker().conversation(random.Random(number)), answers)
        assert sum(isinstance(a, Continuation) and a.is_target for a in actions) == 1


def test_a_conversation_follows_from_its_random_numbers() -> None:

    def actions(seed: int) -> list[Any]:
        answers = [(*words("some words to say here"), END)] * 4
        return follow(maker().conversation(random.Random(seed)), answers)[0]

    assert actions(4) == actions(4)
    assert len({str(actions(seed)) for seed in range(9)}) > 5


def test_an_empty_conversation_is_discarded() -> None:
    """Neither an empty prompt nor an empty answer is worth learning."""
    for number in range(10):
        _, is_used = follow(maker().conversation(random.Random(number)), [(END,)] * 4)
        assert not is_used


def test_a_model_that_does_not_chat_writes_plain_text() -> None:
    actions, is_used = follow(maker(chats=False).conversation(random.Random(0)), [(7,) * 30])
    assert [type(action) for action in actions] == [Given, Continuation]
    assert is_used
    tokens = tuple(range(300, 330))
    actions, is_used = follow(maker().text(tokens), [])
    assert tuple(t for a in actions for t in a.token_ids) == tokens
    assert (actions[-1].is_target, is_used) == (True, True)


@pytest.mark.parametrize("seed", range(worlds(3)))
def test_prompts_differ_and_have_no_holes(seed: int) -> None:
    rng = random.Random(seed)
    prompts = {open_prompt(rng) for _ in range(300)}
    assert len(prompts) > 250
    assert not any("{" in prompt or "  " in prompt for prompt in prompts)
    assert follow_up(rng)
    assert LONGEST_CONVERSATION > 500
