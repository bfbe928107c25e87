"""Made-up transfers of KV between engines."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tests.support.worker.paged_executor import TOKEN_BYTES, kv_of
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.content import content_digest
from worker.kv.transfers import TransferCounts
from worker.types import KvOffer, KvPart, KvPeer, KvSource


@dataclass
class MadeUpPull:
    """A pull that is done after some polls; then it has an `outcome`."""

    looks: int
    outcome: KvPart | None
    is_closed: bool = False

    @property
    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    @property
    def part(self) -> KvPart | None:
        return self.outcome if self.looks < 0 and not self.is_closed else None

    def close(self) -> None:
        self.is_closed = True


@dataclass
class MadeUpConnector:
    """Transfers of prompts by the name of their source, and everything that was stored."""

    prompts: dict[str, tuple[int, list[int], Any]]  # looks, tokens, salt
    failing: frozenset[str] = frozenset()
    counts: TransferCounts = field(default_factory=TransferCounts)
    num_expired: int = 0
    pulls: list[MadeUpPull] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    asked: list[WantedKv] = field(default_factory=list)
    questions: list[WantedKv | None] = field(default_factory=list)  # one a step, or none
    answers: list[tuple[WantedKv, bytes]] = field(default_factory=list)
    promised: set[str] = field(default_factory=set)
    bell: int = -1

    def has_room(self, num_tokens: int) -> bool:
        return True

    def keep(
        self,
        request_id: str,
        digest: bytes,
        data: memoryview,
        blocks: tuple[int, ...],
        name: str | None = None,
    ) -> KvOffer:
        self.stored[name or request_id] = bytes(data)
        source = KvSource("h", 1, "e", name or request_id, len(data) // TOKEN_BYTES)
        return KvOffer(source, blocks, 0.0)

    def pull(self, source: KvSource, digest: bytes, start: int) -> MadeUpPull:
        looks, tokens, salt = self.prompts[source.transfer_id]
        part = None
        fits = digest == content_digest(tokens[: source.num_tokens], salt, None)
        if fits and source.transfer_id not in self.failing:
            data = kv_of(tokens[: source.num_tokens])[TOKEN_BYTES * start :]
            part = KvPart(start, source.num_tokens, data)
        pull = MadeUpPull(looks, part)
        if start < source.num_tokens:
            self.pulls.append(pull)
        return pull

    def ask(self, peer: KvPeer, wanted: WantedKv) -> MadeUpPull:
        """Pull from a peer that has all of the KV under the name of its host."""
        looks, tokens, salt = self.prompts[peer.host]
        held = 0
        fits = salt == wanted.cache_salt and peer.host not in self.failing
        while fits and held < len(tokens) and tokens[held] == wanted.token_ids[held]:
            held += 1
        part = None
        if held > wanted.start:
            data = kv_of(tokens[:held])[TOKEN_BYTES * wanted.start :]
            part = KvPart(wanted.start, held, data)
        self.asked.append(wanted)
        pull = MadeUpPull(looks, part)
        self.pulls.append(pull)
        return pull

    @property
    def has_questions(self) -> bool:
        return bool(self.questions)

    def next_question(self) -> KvQuestion | None:
        wanted = self.questions.pop(0) if self.questions else None
        answered: Any = Future()
        return None if wanted is None else KvQuestion(wanted, answered, self._answered)

    def _answered(self, question: KvQuestion, data: memoryview) -> None:
        self.answers.append((question.wanted, bytes(data)))

    def lend(self, question: KvQuestion, num_tokens: int) -> bool:
        return True

    def promise(self, name: str) -> None:
        self.promised.add(name)

    def leave_model(self) -> None: ...

    @property
    def num_promised(self) -> int:
        return len(self.promised)

    def close(self) -> None: ...
