"""A tiny llama of random weights whose tokens are bytes and pieces of JSON, in a whole engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.support.model.tiny_llama import TINY, tiny_llama
from tests.support.worker.step_driver import outputs as outputs_of
from worker.api.schema.constraints import Constraint, grammar_of
from worker.api.schema.requests import StructuredOutputs
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.grammars import ConstrainedOutputs
from worker.engine.features.speculation import JUMP_FORWARD, Speculation
from worker.engine.messages import AddRequest, Vocabulary
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.grammar import GrammarCompiler
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.loading import ModelNetwork
from worker.executor.model_runner import ModelRunner
from worker.types import FinishReason, SamplingParams

PIECES = (
    '{"', '":', '": ', '", "', '","', '"}', '"]', "[{", "}]", '{"a', '"a":', "]}", "}}", '["', "],",
    "true", "false", "null", "ab", "10", "12", "00", ", ", ": ", "  ", "-1", ".5", "é", "20", "aa",
)  # fmt: skip
END, OTHER_END, MARK = 286, 287, 288
UNNAMED = 3  # embeddings without a token
VOCABULARY = Vocabulary(
    [
        *(bytes((byte,)) for byte in range(256)),
        *(piece.encode() for piece in PIECES),
        *(b"<end>", b"<other>", b"<mark>"),
        *(b"",) * UNNAMED,
    ],
    [END, OTHER_END, MARK],
    [END, OTHER_END],
)
SIZE = len(VOCABULARY.token_bytes)
BLOCK_SIZE = 4
FLATNESS = 0.15
CONFIG = replace(TINY, vocab_size=SIZE, max_context=1024)
# Random weights rarely close what they open: this many more logits for what does, and fewer for
# blanks.
CLOSING = tuple((ord(char), 3.5) for char in '"}]') + tuple(
    (256 + PIECES.index(piece), 3.0) for piece in ('"}', '"]', "}]", "}}", "]}")
)
BLANK = tuple((token, -6.0) for token in (*b" \n\r\t", 256 + PIECES.index("  ")))
BIAS = ((END, 4.0), *CLOSING, *BLANK)
NGRAM = SpeculativeConfig("ngram", 5, prompt_lookup_min=1, enable_adaptive_verification=False)
SUFFIX = replace(NGRAM, method="suffix")
DEVICE = replace(NGRAM, method="draft_model", num_speculative_tokens=3)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None
    stop_token_id: int | None = None
    num_logprobs: int = 0
    num_outputs: int = 0

    @property
    def text(self) -> str:
        return text_of(self.token_ids)


def text_of(token_ids: Sequence[int]) -> str:
    special = {END, OTHER_END, MARK}
    spelled = (VOCABULARY.token_bytes[i] for i in token_ids if i not in special)
    return b"".join(spelled).decode(errors="replace")  # it may have been cut


def grammar(**outputs: Any) -> str:
    return grammar_of(Constraint(StructuredOutputs(**outputs), "field"))


class GrammarBench:
    """One engine; with `speculative` None it drafts nothing, not even what a grammar forces."""

    def __init__(
        self,
        speculative: SpeculativeConfig | None = None,
        num_blocks: int = 8000,
        max_num_seqs: int = 64,
        overlap: bool = True,
    ) -> None:
        model = tiny_llama(3, CONFIG)
        model.final_norm.mul_(FLATNESS)  # so that a draw at temperature 1 may be any token
        shape = (CONFIG.num_layers, num_blocks, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_dim)
        drafter = speculation = None
        if speculative is not None:
            by_tokens = build_drafter(speculative)
            on_device = by_tokens is None and speculative is not JUMP_FORWARD
            speculation = Speculation(speculative, by_tokens, on_device, SIZE)
            if on_device:  # the model drafts for itself, but knows of no grammar
                network, how = ModelNetwork(model), speculative.draft_sample_method
                blocks = (num_blocks, BLOCK_SIZE)
                drafter = CachedDrafter(lambda _: network, network, model, blocks, how)
        runner = ModelRunner(
            model,
            lambda: model,
            lambda: torch.zeros(shape),
            drafter,
            (speculative or NGRAM).rejection_sample_method,
        )
        limits = SchedulerConfig(
            max_model_len=1024, max_num_seqs=max_num_seqs, max_num_batched_tokens=512
        )
        cache = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(cache, limits, (END, OTHER_END), [speculation])
        self.core = EngineCore(self.scheduler, runner, time.monotonic, overlap)
        self.core.take_vocabulary(VOCABULARY)
        self._numbers: Iterator[int] = itertools.count()

    def __enter__(self) -> GrammarBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()

    def run(self, *asked: AddRequest) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        for request in asked:  # so that who runs when does not depend on threads
            constrained = self.scheduler.find(ConstrainedOutputs)
            if request.params.grammar is not None and constrained is not None:
                constrained.grammars.compile(request.params.grammar).result()
        for request in asked:
            self.core.add(request)
            answers |= {name: Answer() for name in (request.request_id, *request.branch_ids)}
        for output in outputs_of(self.core):
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.num_outputs += 1
            answer.num_logprobs += len(output.logprobs)
            answer.reason, answer.error = output.finish_reason, output.error
            answer.stop_token_id = output.stop_token_id
        self.scheduler.check_integrity()
        return answers

    def request(
        self, grammar: str | None, num_answers: int = 1, prompt: Sequence[int] = (), **changes: Any
    ) -> AddRequest:
        name = f"r{next(self._numbers)}"
        params = {"max_tokens": 200, "seed": 1, "logit_bias": BIAS, **changes}
        return AddRequest(
            name,
            list(prompt or b"Say it: "),
            SamplingParams(grammar=grammar, **params),
            0.0,
            branch_ids=[f"{name}+{i}" for i in range(1, num_answers)],
        )


def compiled_error(grammar: str, compiler: GrammarCompiler) -> str | None:
    return compiler.compile(grammar).result().error


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "ngram": {"speculative": NGRAM},
    "suffix": {"speculative": SUFFIX},
    "draft model": {"speculative": DEVICE},
    "preempted": {"num_blocks": 50},
    "preempted, drafts": {"num_blocks": 50, "speculative": NGRAM},
}


def drawn_alone(requests_of: Callable[[GrammarBench], list[AddRequest]]) -> list[list[int]]:
    """Return the tokens of requests that run one after the other."""
    with GrammarBench(overlap=False) as bench:
        return [a.token_ids for r in requests_of(bench) for a in bench.run(r).values()]


def drawn_in(
    settings: dict[str, Any], requests_of: Callable[[GrammarBench], list[AddRequest]]
) -> list[list[int]]:
    """Return the tokens of requests that run together, with drafts and preemptions as set."""
    with GrammarBench(**settings) as bench:
        found = [answer.token_ids for answer in bench.run(*requests_of(bench)).values()]
        stats = bench.scheduler.stats()
    assert (stats.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    assert (stats.speculation.num_accepted_tokens > 0) == ("speculative" in settings)
    return found
