"""Conversations of the target, as programs of given and sampled tokens.

A conversation is a generator: it yields `Given` tokens and `Continuation`s, receives the sampled
tokens, and returns whether the result is worth learning from. It opens with a template and a topic,
or with a prompt that the model writes itself after the beginning of a user's turn (Magpie,
arXiv:2406.08464). Most answers are greedy, because drafts pay most there.
"""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from worker.tokenizer.chat import ChatTemplate
from worker.tokenizer.tokenizer import Tokenizer

# Random letters, which occur in no template.
_MARKS = ("qzkwvx", "xvwkzq", "zqxkvw")
_LONGEST_PROMPT, _LONGEST_ANSWER, _LONGEST_TEXT = 64, 192, 256
_OWN_PROMPT_SHARE, _SECOND_TURN_SHARE, _GREEDY_SHARE = 0.4, 0.2, 0.7
_MIN_TOKENS = 16
# A conversation of two turns, with room for the template's own tokens.
LONGEST_CONVERSATION = 2 * (_LONGEST_PROMPT + _LONGEST_ANSWER) + 128


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens that continue the conversation, independent of the model."""

    token_ids: tuple[int, ...]
    is_target: bool = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that the model samples, up to an end token or `max_tokens`. `temperature` 0 is greedy.
    In a user's turn they are not learned.
    """

    max_tokens: int
    temperature: float
    is_target: bool = True


# Receives the sampled tokens, or None after `Given`; returns whether to use the conversation.
Conversation = Generator[Given | Continuation, tuple[int, ...] | None, bool]


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The tokens of a chat template: before a user's turn, from its end to the beginning of the
    answer, and from the answer's end to the next user's turn.
    """

    before_user: tuple[int, ...]
    before_answer: tuple[int, ...]
    between_turns: tuple[int, ...]


def chat_frame(tokenizer: Tokenizer, template: ChatTemplate) -> ChatFrame:
    user, answer, again = _MARKS
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    before_user, _, after_user = template.render(messages[:1]).partition(user)
    whole = template.render(messages)
    between = whole.partition(answer)[2].partition(again)[0]

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    return ChatFrame(encode(before_user), encode(after_user), encode(between))


@dataclass(frozen=True, slots=True)
class ConversationMaker:
    """Makes conversations, or plain text for a model without a chat template (`frame` None)."""

    tokenizer: Tokenizer
    frame: ChatFrame | None
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    def conversation(self, rng: random.Random) -> Conversation:
        return self._plain(rng) if self.frame is None else self._chat(self.frame, rng)

    def text(self, token_ids: Sequence[int]) -> Conversation:
        start = self.bos_token_ids or token_ids[:1]
        yield Given(tuple(start))
        yield Given(tuple(token_ids if self.bos_token_ids else token_ids[1:]), is_target=True)
        return len(token_ids) >= _MIN_TOKENS

    def _plain(self, rng: random.Random) -> Conversation:
        yield Given(self.bos_token_ids or (rng.randrange(self.tokenizer.vocab_size),))
        said = yield Continuation(_LONGEST_TEXT, temperature=rng.choice((0.6, 0.8, 1.0)))
        return len(said or ()) >= _MIN_TOKENS

    def _chat(self, frame: ChatFrame, rng: random.Random) -> Conversation:
        yield Given(frame.before_user)
        if rng.random() < _OWN_PROMPT_SHARE:
            prompt = (yield Continuation(_LONGEST_PROMPT, temperature=1.0, is_target=False)) or ()
            if len(prompt) < 2:
                return False
        else:
            prompt = self._encode(open_prompt(rng))
            yield Given(prompt)
        turns_left = 1 + (rng.random() < _SECOND_TURN_SHARE)
        num_said = 0
        while True:
            yield Given(self._after(prompt, frame.before_answer))
            temperature = 0.0 if rng.random() < _GREEDY_SHARE else rng.uniform(0.6, 1.0)
            said = (yield Continuation(_LONGEST_ANSWER, temperature)) or ()
            num_said += len(said)
            turns_left -= 1
            if not turns_left or not said or said[-1] not in self.eos_token_ids:
                return num_said >= _MIN_TOKENS
            prompt = self._encode(follow_up(rng))
            yield Given(self._after(said, frame.between_turns) + prompt)

    def _after(self, said: Sequence[int], frame: tuple[int, ...]) -> tuple[int, ...]:
        """Return the template's tokens after an answer or a prompt, without a second end token."""
        ended = bool(said) and said[-1] in self.eos_token_ids
        return frame[1:] if ended and frame[:1] == tuple(said[-1:]) else frame

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


_PROMPTS: dict[str, Any] = yaml.safe_load(
    resources.files("worker.training").joinpath("prompts.yaml").read_text("utf-8")
)
_TOPICS: list[str] = _PROMPTS["topics"].split("; ")


def open_prompt(rng: random.Random) -> str:
    first, second = rng.sample(_TOPICS, 2)
    return str(rng.choice(_PROMPTS["templates"]).format(a=first, b=second))


def follow_up(rng: random.Random) -> str:
    return str(rng.choice(_PROMPTS["follow_ups"]))
