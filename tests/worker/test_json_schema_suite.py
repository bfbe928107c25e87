"""The JSON Schema Test Suite against a whole engine, and random expressions and grammars.

A line of the suite's file is a group of its tests for draft 2020-12: [file, description, schema,
[[is valid, instance], …]]. Refused keywords have only their schemas.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from tests.depth import by_depth, some
from tests.support.worker.grammar_bench import (
    BIAS,
    END,
    NGRAM,
    Answer,
    GrammarBench,
    compiled_error,
    grammar,
)
from worker.engine.messages import AddRequest
from worker.engine.sequences.grammar import GrammarCompiler
from worker.errors import RequestError
from worker.types import FinishReason

SUITE = Path(__file__).parents[1] / "data" / "json_schema_test_suite.jsonl"
NUM_ANSWERS = 2
LIKELY = 1.5
REFUSED_FILES = {
    *("contains", "dependentRequired", "dependentSchemas", "dynamicRef", "if-then-else"),
    *("maxContains", "minContains", "not", "propertyNames", "refRemote", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
# The cases in these files whose schema has no effect.
IDLE = re.compile(
    r"ignore|non-interference|boolean schema (?:true|false)$|(?:Items|Properties) true$|=false"
)
STANDARD = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class Group:
    file: str
    description: str
    schema: dict[str, Any]
    tests: list[tuple[bool, Any]]
    grammar: str | None
    error: str | None


@pytest.fixture(scope="module")
def groups(compiler: GrammarCompiler) -> list[Group]:
    found: list[Group] = []
    for line in SUITE.read_text().splitlines():
        file, description, schema, tests = json.loads(line)
        try:
            text = grammar(json=schema)
            error = compiled_error(text, compiler)
        except RequestError as refusal:
            text, error = "", refusal.message
        taken = text if error is None else None
        found.append(Group(file, description, schema, tests, taken, error))
    return found


@pytest.fixture(scope="module")
def taken(groups: list[Group]) -> list[Group]:
    return [group for group in groups if group.grammar is not None]


def test_exactly_the_documented_keywords_are_refused(groups: list[Group]) -> None:
    taken = {g.file for g in groups if g.grammar is not None and not IDLE.search(g.description)}
    idle = {g.file for g in groups if g.file in REFUSED_FILES and g.grammar is not None}
    assert idle == {
        *("if-then-else", "maxContains", "minContains", "not", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
    assert {group.file for group in groups} - taken == REFUSED_FILES


def test_a_refusal_names_a_word_of_the_schema(groups: list[Group]) -> None:
    """Exempt are schemas that refer to the standard's own, whose contents are then the reason."""
    for group in groups:
        text = json.dumps(group.schema)
        if group.error is not None and "match" not in group.error and STANDARD not in text:
            words = re.findall(r"[\w$/.-]+", text)
            assert any(len(word) > 1 and word in group.error for word in words), group.error


def spellings(value: Any) -> Iterator[str]:
    def escaped(text: str) -> str:
        units = text.encode("utf-16-be", "surrogatepass").hex()
        return '"' + re.sub("(....)", r"\\u\1", units) + '"'

    def spell(value: Any, text: Callable[[str], str]) -> str:
        if isinstance(value, str):
            return text(value)
        if isinstance(value, list):
            return "[" + ",".join(spell(item, text) for item in value) + "]"
        if isinstance(value, dict):
            turned = [f"{text(k)}:{spell(v, text)}" for k, v in reversed(value.items())]
            return "{" + ",".join(turned) + "}"
        return json.dumps(value)

    yield json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False)
    yield spell(value, json.dumps)
    yield spell(value, escaped)


def test_no_invalid_instance_is_ever_allowed(taken: list[Group], compiler: GrammarCompiler) -> None:
    wrong, allowed = [], []
    for group in taken:
        start = compiler.compile(str(group.grammar)).result()
        for is_valid, instance in group.tests:
            texts = [text.encode("utf-8", "replace") for text in spellings(instance)]
            fits = [start.fork().num_allowed([], [*text, END]) == len(text) + 1 for text in texts]
            if is_valid:
                allowed.append(any(fits))
            elif any(fits):
                wrong.append((group.file, group.description, instance))
    assert wrong == []
    assert len(allowed) > 400
    assert sum(allowed) > 0.9 * len(allowed)


def asked(bench: GrammarBench, group: Group, seed: int) -> AddRequest:
    letters = {*json.dumps(group.schema).encode()} - {*b'"}]{[,: '}
    bias = (*BIAS, *((letter, LIKELY) for letter in sorted(letters)))
    return bench.request(group.grammar, seed=seed, logit_bias=bias, max_tokens=40)


def answers(groups: list[Group], **settings: Any) -> list[Answer]:
    with GrammarBench(max_num_seqs=256, **settings) as bench:
        requests = [asked(bench, group, seed) for group in groups for seed in range(NUM_ANSWERS)]
        found = bench.run(*requests)
        is_preempted = bench.scheduler.stats().scheduler.num_preemptions > 0
        assert is_preempted == (settings["num_blocks"] < 5000)
    return [found[request.request_id] for request in requests]


@pytest.fixture(scope="module")
def plain(taken: list[Group]) -> list[Answer]:
    return answers(taken, num_blocks=30_000)


@pytest.mark.full
def test_sampled_answers_validate(taken: list[Group], plain: list[Answer]) -> None:
    """The second validator checks formats and supports expressions of ECMA-262."""
    num_ended = 0
    for index, answer in enumerate(plain):
        group = taken[index // NUM_ANSWERS]
        assert answer.reason in (FinishReason.STOP, FinishReason.LENGTH), (group, answer)
        if answer.reason is FinishReason.LENGTH:
            continue
        num_ended += 1
        other = jsonschema_rs.Draft202012Validator(group.schema, validate_formats=True)
        value = json.loads(answer.text, parse_float=Decimal)
        assert other.is_valid(value), (group.schema, answer.text)
        if "ecmascript" not in group.file:
            jsonschema.Draft202012Validator(group.schema).validate(json.loads(answer.text))
    assert num_ended > 0.9 * len(plain)


@pytest.mark.parametrize("num_blocks", by_depth([90], [30_000, 90]))
@pytest.mark.parametrize(
    "speculative", some([pytest.param(NGRAM, id="speculative"), pytest.param(None, id="plain")])
)
def test_the_same_seed_gives_the_same_answers(
    taken: list[Group], plain: list[Answer], num_blocks: int, speculative: Any
) -> None:
    some = taken[::8]
    found = answers(some, num_blocks=num_blocks, speculative=speculative)
    wanted = [answer for place, answer in enumerate(plain) if place // NUM_ANSWERS % 8 == 0]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]


# ---- expressions and grammars --------------------------------------------------------------------


def expression(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(3 if depth == 0 else 7)
    if kind < 2:
        return re.escape(rng.choice(["a", "b", "ab", "é", "0", "-", ".", "(", '"', "\\", " "]))
    if kind == 2:
        return rng.choice(["[a-c]", "[^a-y]", "[0-9é]", r"[\]x-]", r"\.", "[A-Z]", "(?i:q)"])
    inner = expression(rng, depth - 1)
    if kind == 3:
        return f"(?:{inner})" + rng.choice(["?", "*", "+", "{2}", "{1,3}", "*?", "{0,2}"])
    if kind == 4:
        return f"(?:{inner}|{expression(rng, depth - 1)})"
    return inner + expression(rng, depth - 1)


def test_answers_match_random_expressions() -> None:
    rng = random.Random(25)
    texts = [expression(rng) for _ in range(80)]
    with GrammarBench(max_num_seqs=256, num_blocks=30_000) as bench:
        requests = [
            (text, bench.request(grammar(regex=text), seed=seed, max_tokens=60))
            for text in texts
            for seed in range(NUM_ANSWERS)
        ]
        found = bench.run(*(request for _, request in requests))
    ended = [(text, found[r.request_id]) for text, r in requests]
    ended = [(text, answer) for text, answer in ended if answer.reason is FinishReason.STOP]
    assert len(ended) > 0.8 * len(requests)
    for text, answer in ended:
        assert re.fullmatch(text, answer.text), (text, answer.text)


@dataclass(frozen=True)
class Rule:
    kind: str
    text: str = ""
    parts: tuple[Rule, ...] = ()

    def ebnf(self) -> str:
        parts = [part.ebnf() for part in self.parts]
        if self.kind == "text":
            return json.dumps(self.text, ensure_ascii=False)
        if self.kind == "name":
            return self.text
        if self.kind == "or":
            return "(" + " | ".join(parts) + ")"
        return " ".join(parts) if self.kind == "and" else f"({parts[0]}){self.kind}"

    def ends(self, text: str, start: int, rules: dict[str, Rule]) -> set[int]:
        if self.kind == "text":
            return {start + len(self.text)} if text.startswith(self.text, start) else set()
        if self.kind == "name":
            return rules[self.text].ends(text, start, rules)
        if self.kind == "or":
            return {end for part in self.parts for end in part.ends(text, start, rules)}
        if self.kind == "and":
            places = {start}
            for part in self.parts:
                places = {end for place in places for end in part.ends(text, place, rules)}
            return places
        found = {start} if self.kind in "?*" else set()
        new = {start}
        while new := {e for place in new for e in self.parts[0].ends(text, place, rules)} - found:
            found |= new
            if self.kind == "?":
                break
        return found


def random_rule(rng: random.Random, names: list[str], depth: int) -> Rule:
    """Names follow a text, so that matching ends."""
    first = Rule("text", "".join(rng.choices('ab0"(é\\', k=rng.randint(1, 3))))
    if depth == 0:
        return first
    kind = rng.choice(["and", "or", "?", "*", "+", "name"])
    inner = random_rule(rng, names, depth - 1)
    if kind == "name":
        # With an alternative, so that recursion can end.
        return Rule(
            "or", parts=(Rule("and", parts=(first, Rule("name", rng.choice(names)))), inner)
        )
    if kind == "or":
        return Rule("or", parts=(inner, random_rule(rng, names, depth - 1)))
    if kind == "and":
        return Rule("and", parts=(inner, random_rule(rng, names, depth - 1)))
    return Rule("and", parts=(first, Rule(kind, parts=(inner,))))


def test_answers_match_random_grammars() -> None:
    rng = random.Random(26)
    names = ["root", "left", "right"]
    grammars = [{name: random_rule(rng, names, 3) for name in names} for _ in range(60)]
    with GrammarBench(max_num_seqs=256, num_blocks=30_000) as bench:
        requests = []
        for rules in grammars:
            text = "\n".join(f"{name} ::= {rule.ebnf()}" for name, rule in rules.items())
            requests += [
                (rules, bench.request(grammar(grammar=text), seed=seed, max_tokens=60))
                for seed in range(NUM_ANSWERS)
            ]
        found = bench.run(*(request for _, request in requests))
    num_ended = 0
    for rules, request in requests:
        answer = found[request.request_id]
        assert answer.reason in (FinishReason.STOP, FinishReason.LENGTH), answer.error
        if answer.reason is FinishReason.STOP:
            num_ended += 1
            assert len(answer.text) in rules["root"].ends(answer.text, 0, rules), answer.text
    assert num_ended > 0.8 * len(requests)
