"""The content of requests: sessions of turns, with text made of common words.

One long ring of words is drawn once, and every text is a slice of it after a word of its own: so a
prompt costs one copy, and two texts share a beginning only on purpose.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random
from typing import Protocol

RING_WORDS = 1 << 16
# Short words, each of which is one token in most vocabularies.
_WORD_LIST = """
the,of,and,to,in,is,that,for,it,as,was,with,be,by,on,not,he,his,but,at,are,this,have,from,or,had
an,they,which,one,you,were,all,her,she,there,would,their,we,him,been,has,when,who,will,no,more
if,out,so,up,said,what,its,about,than,into,them,can,only,other,time,new,some,could,these,two,may
first,then,do,any,like,my,now,over,such,our,man,me,even,most,made,after,also,did,many,off,before
must,well,back,through,years,much,where,your,way,down,should,because,long,each,just,state,those
people,too,world,own,work,men,here,between,both,life,being,under,never,day,same,another,know
while,last,might,great,old,year,since,go,came,right,used,take,three,small,large,place,part,water
house,point,city,night,head,next,still,white,left,found,river,light,study,line,group
"""
_WORDS = tuple(_WORD_LIST.replace(",", " ").split())


@dataclass(frozen=True, slots=True)
class TokenRange:
    low: int
    high: int

    def draw(self, rng: Random) -> int:
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class SessionTurn:
    text: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TurnSession:
    """A session of turns; `at_seconds` is its time in a trace, None if arrivals are drawn."""

    system: str
    exchanges: tuple[SessionTurn, ...]
    at_seconds: float | None = None


class Texts(Protocol):
    def text(self, key: int, num_tokens: int) -> str: ...


class WordRing:
    """Makes texts of about as many tokens as asked for; `seed` selects the ring of words."""

    def __init__(self, seed: int, tokens_per_word: float) -> None:
        rng = Random(seed)
        words = rng.choices(_WORDS, k=RING_WORDS)
        self._text = " ".join(words)
        self._text += " " + self._text
        lengths = [len(word) + 1 for word in words]
        self._starts = list(accumulate(lengths + lengths, initial=0))
        self._tokens_per_word = tokens_per_word
        self._mark = rng.getrandbits(32)

    def text(self, key: int, num_tokens: int) -> str:
        """Return a text. Of two texts with the same key, the longer begins with the shorter."""
        words = max(1, round(num_tokens / self._tokens_per_word))
        mixed = ((key ^ self._mark) * 0x9E3779B97F4A7C15) & (2**64 - 1)  # Fibonacci hashing
        # Texts differ in their first word; it is a word because each digit is a token.
        marks = [_WORDS[(mixed >> shift) % len(_WORDS)] for shift in (8, 20, 32, 44)][:words]
        at, rest = mixed % RING_WORDS, words - len(marks)
        whole, part = divmod(rest, RING_WORDS)
        pieces = [" ".join(marks)] + [self._text[: self._starts[RING_WORDS] - 1]] * whole
        if part:
            pieces.append(self._text[self._starts[at] : self._starts[at + part] - 1])
        return " ".join(pieces)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Sessions of drawn lengths. Each begins with a system prompt of `prefix_tokens`: one that a
    group of the `prefix_groups` shares or, if there are none, its own. With `prefix_prompts` a
    group has only that many first questions (as in the data set `shared_prefix` of inference-perf).
    """

    input_tokens: TokenRange = TokenRange(512, 512)
    output_tokens: TokenRange = TokenRange(128, 128)
    prefix_groups: int = 0
    prefix_tokens: TokenRange | None = None
    prefix_prompts: int = 0
    turns: TokenRange = TokenRange(1, 1)

    def sessions(self, ring: Texts, rng: Random) -> Iterator[TurnSession]:
        while True:
            system, asker = "", rng
            if self.prefix_tokens is not None:
                group = rng.randrange(self.prefix_groups) if self.prefix_groups else None
                # The draws of a group are the same every time.
                drawer = rng if group is None else Random(f"group {group}")
                key = rng.getrandbits(63) if group is None else group
                system = ring.text(key, self.prefix_tokens.draw(drawer))
                if self.prefix_prompts:
                    asker = Random(f"group {group} prompt {rng.randrange(self.prefix_prompts)}")
            exchanges = tuple(
                SessionTurn(
                    ring.text(drawer.getrandbits(63), self.input_tokens.draw(drawer)),
                    self.output_tokens.draw(rng),
                )
                for drawer in [asker, *[rng] * (self.turns.draw(rng) - 1)]
            )
            yield TurnSession(system, exchanges)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace: seconds from its beginning, lengths in tokens, and ids of blocks of
    `block_tokens`, equal for equal texts. Without ids, prompts share nothing.
    """

    at_seconds: float
    input_tokens: int
    output_tokens: int
    block_ids: Sequence[int] = ()
    block_tokens: int = 1

    def session(self, ring: Texts, speed: float, key: int) -> TurnSession:
        """Build the session; `key` is for the tokens outside any block."""
        left, pieces = self.input_tokens, []
        for block in self.block_ids:
            pieces.append(ring.text(block, min(left, self.block_tokens)))
            left -= self.block_tokens
            if left <= 0:
                break
        if left > 0:
            pieces.append(ring.text(key, left))
        text = " ".join(pieces)
        return TurnSession("", (SessionTurn(text, self.output_tokens),), self.at_seconds / speed)


Sessions = Callable[[Texts, Random], Iterable[TurnSession]]


def traced_sessions(trace: Sequence[TracedRequest], speed: float) -> Sessions:
    """Return a trace's sessions; `speed` of its seconds pass in one of ours. Can be pickled."""
    return partial(_traced, trace, speed)


def _traced(
    trace: Sequence[TracedRequest], speed: float, ring: Texts, rng: Random
) -> Iterator[TurnSession]:
    for one in trace:
        yield one.session(ring, speed, rng.getrandbits(63))
