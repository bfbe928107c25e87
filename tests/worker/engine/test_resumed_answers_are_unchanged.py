"""Answers that another engine has begun: cut after every token, they continue unchanged."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.worker.grammar_bench import BIAS, DEVICE, END, MARK, NGRAM, SUFFIX, GrammarBench
from tests.support.worker.step_driver import outputs as outputs_of
from worker.api.schema.constraints import Constraint, grammar_of
from worker.api.schema.requests import StructuredOutputs
from worker.engine.features.grammars import ConstrainedOutputs
from worker.engine.features.speculation import JUMP_FORWARD
from worker.engine.messages import AddRequest, RequestOutput
from worker.types import FinishReason, RepetitionDetection

POINTS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 77, "top_p": 0.9, "top_k": 50},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "limits": {"min_tokens": 9, "stop_token_ids": (MARK,), "logit_bias": ((MARK, 9.0),)},
    "bad words": {"bad_words": ((ord("a"), ord("b")), (ord("1"),))},
    "log probabilities": {"logprobs": 3},
    "repetition": {
        "temperature": 0.0,
        "logit_bias": ((ord("a"), 9.0),),
        "repetition_detection": RepetitionDetection(4, 1, 8),
    },
    "grammar": {
        "grammar": grammar_of(Constraint(StructuredOutputs(json=POINTS), "json")),
        "max_tokens": 40,
        "logit_bias": BIAS,
    },
}
PROMPTS = {"short": b"Say it: ", "in chunks": b"".join(b"%d, " % n for n in range(140))}


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, GrammarBench]]:
    kinds = {"plain": None, "jump": JUMP_FORWARD, "ngram": NGRAM, "suffix": SUFFIX, "own": DEVICE}
    made = {name: GrammarBench(kind) for name, kind in kinds.items()}
    yield made
    for bench in made.values():
        bench.core.shutdown()


def run(bench: GrammarBench, asked: list[AddRequest]) -> dict[str, RequestOutput]:
    reported = {request.request_id: [] for request in asked}
    for request in asked:
        constrained = bench.scheduler.find(ConstrainedOutputs)
        if request.params.grammar is not None and constrained is not None:
            constrained.grammars.compile(request.params.grammar).result()
        bench.core.add(request)
    for output in outputs_of(bench.core):
        reported[output.request_id].append(output)
    bench.scheduler.check_integrity()
    return {
        name: msgspec.structs.replace(
            outputs[-1],
            token_ids=[token for output in outputs for token in output.token_ids],
            logprobs=[entry for output in outputs for entry in output.logprobs],
        )
        for name, outputs in reported.items()
    }


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "plain") for case in CASES),
        ("grammar", "jump"),
        *((case, "ngram") for case in ("seeded", "penalties", "grammar")),
        ("seeded", "suffix"),
        *((case, "own") for case in ("seeded", "grammar")),
    ],
)
def test_it_continues_anywhere(benches: dict[str, GrammarBench], case: str, kind: str) -> None:
    first, second = benches["plain"], benches[kind]
    prompt = PROMPTS["in chunks" if case == "penalties" else "short"]
    fields = {"max_tokens": 16, "logit_bias": (), **CASES[case]}
    whole = first.request(fields.pop("grammar", None), prompt=prompt, **fields)
    (said,) = run(first, [whole]).values()
    assert said.finish_reason not in (None, FinishReason.ERROR)
    assert len(said.token_ids) > 7
    for turn in range(2):
        pieces = [
            msgspec.structs.replace(
                whole, request_id=f"{case}{turn}{cut}", output_token_ids=said.token_ids[:cut]
            )
            for cut in range(len(said.token_ids))
        ]
        before = second.scheduler.stats().scheduler
        for cut, rest in enumerate(run(second, pieces).values()):
            assert rest.token_ids == said.token_ids[cut:]
            assert rest.logprobs == said.logprobs[cut:]
            assert rest.finish_reason == said.finish_reason
            assert rest.stop_token_id == said.stop_token_id
            assert rest.num_cached_tokens <= len(prompt)
        after = second.scheduler.stats().scheduler
        assert after.prompt_tokens - before.prompt_tokens == len(pieces) * len(prompt)
        drawn = sum(len(said.token_ids) - cut for cut in range(len(pieces)))
        assert after.generation_tokens - before.generation_tokens == drawn


def test_one_that_no_longer_fits_is_refused(benches: dict[str, GrammarBench]) -> None:
    bench = benches["plain"]
    request = bench.request(None, prompt=[1] * 1000)
    (reported,) = run(bench, [msgspec.structs.replace(request, output_token_ids=[2] * 24)]).values()
    assert reported.finish_reason is FinishReason.ERROR
    assert "1024" in (reported.error or "")


def test_tokens_that_the_grammar_forbids_end_the_answer(benches: dict[str, GrammarBench]) -> None:
    bench = benches["plain"]
    request = bench.request(CASES["grammar"]["grammar"])
    asked = msgspec.structs.replace(request, output_token_ids=[*b"no", END])
    (reported,) = run(bench, [asked]).values()
    assert reported.finish_reason is FinishReason.ERROR
