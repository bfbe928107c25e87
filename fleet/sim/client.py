"""The bench's client, text and form in virtual time. A token is a character: its id is the
character's number, so that texts, answers and prompts of later turns need no tokenizer.
"""

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np

from fleet.bench.client import Record
from fleet.sim.living_worker import WorkerGoneError
from fleet.sim.virtual_fleet import VirtualFleet
from picker.errors import RefusedError
from picker.requestcontrol.headers import OBJECTIVE

VOCABULARY = range(256, 1280)
RETRY_SECONDS = 1.0  # a closed loop of refusals would never advance the clock
_RING_TOKENS = 1 << 16
_MARKS = (8, 20, 32, 44)
_TEMPLATE = chr(VOCABULARY[0])


class TokenTexts:
    """Makes texts of exactly `num_tokens` tokens, which begin as those of a `WordRing` do."""

    def __init__(self, seed: int) -> None:
        self._text, self._mark = _ring(seed)

    def text(self, key: int, num_tokens: int) -> str:
        mixed = ((key ^ self._mark) * 0x9E3779B97F4A7C15) & (2**64 - 1)  # Fibonacci hashing
        marks = "".join(chr(VOCABULARY[(mixed >> shift) % len(VOCABULARY)]) for shift in _MARKS)
        whole, part = divmod(max(0, num_tokens - len(marks)), _RING_TOKENS)
        at = mixed % _RING_TOKENS
        text = marks + self._text[:_RING_TOKENS] * whole + self._text[at : at + part]
        return text[:num_tokens]


@lru_cache(maxsize=16)  # a fit and a search run the same load many times
def _ring(seed: int) -> tuple[str, int]:
    rng = Random(seed)
    text = "".join(map(chr, rng.choices(VOCABULARY, k=_RING_TOKENS)))
    return text * 2, rng.getrandbits(32)


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenForm:
    """Makes prompts of all messages so far, after as many tokens as a chat template adds."""

    template_tokens: int = 0

    def body(self, messages: list[dict[str, str]], output_tokens: int) -> Ask:
        text = _TEMPLATE * self.template_tokens
        text += "".join(one["content"] for one in messages)
        tokens: list[int] = np.frombuffer(text.encode("utf-32-le"), "<u4").tolist()
        return Ask(tokens, output_tokens)


class VirtualClient:
    def __init__(self, fleet: VirtualFleet, objective: str = "") -> None:
        self._fleet = fleet
        self._headers = {OBJECTIVE[0]: objective} if objective else {}
        self.in_flight = 0

    async def ask(self, body: Ask, outcome: Record, /) -> None:
        loop = asyncio.get_running_loop()
        outcome.sent = loop.time()
        self.in_flight += 1
        try:
            served = await self._fleet.ask(body.prompt, body.output_tokens, self._headers)
        except RefusedError as refusal:
            outcome.status, outcome.error = refusal.status, f"{refusal.status} {refusal.message}"
        except WorkerGoneError:
            outcome.status, outcome.error = 503, "503 the worker died"
        else:
            outcome.status = 200
            outcome.first_token = served.arrived_seconds + served.ttft_seconds
            outcome.last_token = served.arrived_seconds + served.seconds
            outcome.gaps = served.gaps
            outcome.prompt_tokens, outcome.cached_tokens = served.num_prompt, served.num_cached
            outcome.output_tokens = len(served.token_ids)
            if outcome.text is not None:
                outcome.text.append("".join(map(chr, served.token_ids)))
        finally:
            self.in_flight -= 1
        outcome.ended = loop.time()
        if outcome.error:
            await asyncio.sleep(RETRY_SECONDS)
