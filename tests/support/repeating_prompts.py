"""Short prompts that repeat themselves, so that a model goes on with what was said before."""

from __future__ import annotations

from random import Random

from worker.tokenizer.tokenizer import Tokenizer

VOCABULARY = range(17, 49152)  # of the default model, without its control tokens
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jacob")
THINGS = ("apple", "bridge", "candle", "drum", "engine", "flower", "garden", "hammer", "island")
PLACES = ("in Paris", "at home", "by the river", "on the hill", "at school", "in the old town")
STEMS = (
    "Below is a list of sentences. Each of them was written down on the same day. ",
    "def check(values):\n    for value in values:\n        if value is None:\n            raise ",
    "",
    "",
)


def text_prompt(rng: Random) -> str:
    """A text that says much the same thing several times, cut off in the middle."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    verb = rng.choice(("lost", "found", "painted", "sold", "borrowed"))
    line = f"{name} {verb} the {thing} {place}. "
    other = line.replace(name, rng.choice(NAMES))
    words = (rng.choice(STEMS) + line + other + line).split(" ")
    return " ".join(words[: len(words) - rng.randrange(1, 8)])


def pattern_prompt(rng: Random) -> list[int]:
    """A pattern of random tokens, some two times; models go on with it."""
    pattern = [rng.choice(VOCABULARY) for _ in range(rng.randrange(3, 8))]
    return (pattern * 3)[: len(pattern) * 2 + rng.randrange(len(pattern))]


def prompts(tokenizer: Tokenizer, rng: Random, count: int) -> list[tuple[int, ...]]:
    """Different prompts of 6 to 50 tokens: texts, patterns, patterns that begin like another."""
    found: dict[tuple[int, ...], None] = {}
    shared = [rng.choice(VOCABULARY) for _ in range(21)]
    while len(found) < count:
        kind = len(found) % 3
        if kind == 0:
            tokens = tokenizer.encode(text_prompt(rng), add_special_tokens=False)
        else:
            tokens = (shared if kind == 1 else []) + pattern_prompt(rng)
        found[tuple(tokens)] = None
    return list(found)
