"""Answers of a whole engine match their schemas, regular expressions and grammars.

A tiny llama of random weights draws at temperature 1, so that only the grammar shapes the answer.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.depth import by_depth
from tests.support.worker.grammar_bench import (
    BIAS,
    DEVICE,
    END,
    MARK,
    NGRAM,
    SETTINGS,
    Answer,
    GrammarBench,
    compiled_error,
    drawn_alone,
    drawn_in,
    grammar,
    text_of,
)
from worker.api.schema.constraints import after_reasoning
from worker.config import SpeculativeConfig
from worker.engine.features.speculation import JUMP_FORWARD
from worker.engine.sequences.grammar import GrammarCompiler
from worker.errors import RequestError
from worker.types import FinishReason

DATA = Path(__file__).parents[1] / "data"
NUM_ANSWERS = by_depth(2, 5)
NAMED = {"type": "object", "additionalProperties": False}
POINT = {
    **NAMED,
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}


def table(name: str) -> dict[str, list[Any]]:
    """Read a file of which each line is a list that begins with its row's name."""
    rows = map(json.loads, (DATA / name).read_text().splitlines())
    return {name: columns for name, *columns in rows}


SCHEMAS: dict[str, Any] = {name: row[0] for name, row in table("enforced_schemas.jsonl").items()}
REFUSED = table("refused_schemas.jsonl")  # a schema, and a word of the message


@pytest.fixture(scope="module")
def bench() -> Iterator[GrammarBench]:
    with GrammarBench() as bench:
        yield bench


def ended(bench: GrammarBench, text: str, count: int = NUM_ANSWERS, **how: Any) -> list[Answer]:
    """Return those of `count` answers that a grammar's end ended."""
    asked = [bench.request(text, seed=seed, **how) for seed in range(count)]
    return [a for a in bench.run(*asked).values() if a.reason is FinishReason.STOP]


def answer_to(bench: GrammarBench, *asked: Any, **how: Any) -> Answer:
    [answer] = bench.run(bench.request(*asked, **how)).values()
    return answer


@pytest.fixture(scope="module")
def answers(bench: GrammarBench) -> dict[str, list[Answer]]:
    asked = {
        name: [bench.request(grammar(json=schema), seed=seed) for seed in range(NUM_ANSWERS)]
        for name, schema in SCHEMAS.items()
    }
    found = bench.run(*(request for requests in asked.values() for request in requests))
    return {name: [found[r.request_id] for r in requests] for name, requests in asked.items()}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_validate(answers: dict[str, list[Answer]], name: str) -> None:
    ended = [answer for answer in answers[name] if answer.reason is FinishReason.STOP]
    others = [answer for answer in answers[name] if answer not in ended]
    assert ended
    assert all(answer.reason is FinishReason.LENGTH for answer in others)
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for answer in ended:
        validator.validate(json.loads(answer.text))


def test_most_answers_are_complete(answers: dict[str, list[Answer]]) -> None:
    """Otherwise the test above would prove little."""
    reasons = [answer.reason for each in answers.values() for answer in each]
    assert reasons.count(FinishReason.STOP) > 0.9 * len(reasons)


@pytest.mark.parametrize("name", REFUSED)
def test_an_unenforceable_keyword_is_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    schema, word = REFUSED[name]
    try:
        error = compiled_error(grammar(json=schema), compiler)
    except RequestError as refusal:
        error = refusal.message
    assert error is not None
    assert word in error


REGEXES = (
    r"yes|no",
    r"[a-c]{3}",
    r"\d{3}-\d{2}",
    r"(ab?c)+",
    r"[^x]{2,5}",
    r"(\+|-)?[0-9]+(\.[0-9]{1,3})?",
    r"(?i)hello",
    r"a.c",
    r"é{1,3}[à-ü]",
    r"[a-z]{1,5}@[a-z]{1,5}\.com",
    r"^(left|right)$",
    r"",
)


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_match_a_regular_expression(bench: GrammarBench, regex: str) -> None:
    answers = ended(bench, grammar(regex=regex))
    assert answers
    for answer in answers:
        assert re.fullmatch(regex, answer.text), answer.text


# Grammars in EBNF and Lark, with equivalent regular expressions.
GRAMMARS = {
    'root ::= "a" | "b" root': r"b*a",
    'root ::= pair ("," pair)*\npair ::= [a-c]+ "=" [0-9]': r"[a-c]+=[0-9](,[a-c]+=[0-9])*",
    'root ::= ("x" | "y"){2,3} "!"?': r"[xy]{2,3}!?",
    'start: word (" " word)*\nword: /[a-d]{1,3}/': r"[a-d]{1,3}( [a-d]{1,3})*",
    'start: "<" start ">" | "o"': r"<*o>*",
    "start: SIGN? INT\nSIGN: /[+-]/\nINT: /[0-9]{1,4}/": r"[+-]?[0-9]{1,4}",
}


@pytest.mark.parametrize("text", GRAMMARS)
def test_answers_match_a_grammar(bench: GrammarBench, text: str) -> None:
    answers = ended(bench, grammar(grammar=text))
    assert answers
    for answer in answers:
        assert re.fullmatch(GRAMMARS[text], answer.text), answer.text
        assert answer.text.count("<") == answer.text.count(">")


FITS: list[tuple[dict[str, Any], dict[str, bool]]] = [
    ({"regex": r"\d\w"}, {"1a": True, "\u0661a": False, "1é": False}),
    ({"regex": r"[^\W\d]\s"}, {"a\t": True, "é ": False, "a\u2003": False}),
    ({"regex": r"[^\s]\S"}, {"aé": True, "\u00a0a": False, "a\ufeff": False}),
    ({"regex": r"\D\W"}, {"a-": True, "\u0661-": False, "aж": False, "a²": False, "é☃": True}),
    ({"json": {"pattern": r"^\w$", "type": "string"}}, {'"z"': True, '"ß"': False}),
    (
        {"json": {"pattern": r"^(?!\w*$)[\w-]+$", "type": "string"}},
        {'"a-"': True, '"ab"': False, '"é-"': False},
    ),
    ({"grammar": 'start: "№" WORD // \\w"\nWORD: /[\\w\\/]+/'}, {"№a/b": True, "№ж": False}),
    ({"grammar": '?start: one\n?one: "x" /\\d/'}, {"x5": True, "x\u096b": False}),
    ({"grammar": '\n  // ::= \n  ?start: "::=" | "y"\n'}, {"::=": True, "y": True, "x": False}),
    ({"grammar": r'root ::= "\u00fc" [\u0021\u005d\u2603]'}, {"ü]": True, "ü☃": True, "ü[": False}),
    ({"grammar": r'root ::= "\\u00fc" | "\u0022\U0001F642"'}, {r"\u00fc": True, '"🙂': True}),
    ({"grammar": '# start: \nroot ::= start start\nstart ::= [ab] # "x'}, {"ab": True, "a": False}),
    (
        {"grammar": 'start: "at " time\ntime: %json {"type": "string", "format": "date"}'},
        {'at "2024-02-29"': True, 'at "2023-02-29"': False},
    ),
]


@pytest.mark.parametrize(("outputs", "texts"), FITS)
def test_classes_escapes_and_dialects_have_one_meaning(
    compiler: GrammarCompiler, outputs: dict[str, Any], texts: dict[str, bool]
) -> None:
    r"""`\d`, `\w` and `\s` are ASCII in every constraint; `::=` marks GBNF."""
    start = compiler.compile(grammar(**outputs)).result()
    assert start.error is None
    for text, fits in texts.items():
        whole = [*text.encode(), END]
        assert (start.fork().num_allowed([], whole) == len(whole)) is fits, text


INTEGERS = {"type": "array", "items": {"type": "integer"}}
TAGGED = {
    "type": "structural_tag",
    "triggers": ["<"],
    "structures": [{"begin": "<", "schema": INTEGERS, "end": ">"}],
}


@pytest.mark.parametrize(
    ("outputs", "around"),
    [
        ({"json": INTEGERS}, "{}"),
        ({"json_object": True}, '{{"a":{}}}'),
        ({"structural_tag": json.dumps(TAGGED)}, "<{}>"),
        ({"grammar": f"start: %json {json.dumps(INTEGERS)}"}, "{}"),
    ],
)
def test_white_space_within_json_is_bounded(
    compiler: GrammarCompiler, outputs: dict[str, Any], around: str
) -> None:
    start = compiler.compile(grammar(**outputs)).result()
    for blanks, fits in (
        *(("", True), (" ", True), ("\t", True), ("\n", True), (" \n\n" + " " * 40, True)),
        *(("\r\n\t\t", True), ("  ", False), ("\n\n\n", False), ("\n" + " " * 41, False)),
    ):
        whole = [*around.format(f"[1,{blanks}2{blanks}]").encode(), END]
        assert (start.fork().num_allowed([], whole) == len(whole)) is fits, repr(blanks)


def test_an_answer_of_endless_white_space_is_impossible(bench: GrammarBench) -> None:
    """White space is by far the likeliest here."""
    blanks = tuple((ord(char), 40.0) for char in " \n\r\t")
    bias = (*BIAS[:9], *blanks)
    answer = answer_to(bench, grammar(json=POINT), logit_bias=bias, max_tokens=600)
    assert answer.reason is FinishReason.STOP
    jsonschema.validate(json.loads(answer.text), POINT)
    assert max(map(len, re.findall(r"\s+", answer.text))) > 40


def test_answers_are_among_the_choices(bench: GrammarBench) -> None:
    choices = ["a", 'say "hi"', "two\nlines", "é☃", "/x/", "\\d", "\u2028", "a b", "abc", "\x7f"]
    asked = [bench.request(grammar(choice=choices), seed=seed) for seed in range(30)]
    found = {answer.text for answer in bench.run(*asked).values()}
    assert found <= set(choices)
    assert len(found) > 3


def test_json_object_answers_are_json_objects(bench: GrammarBench) -> None:
    answers = ended(bench, grammar(json_object=True), 10)
    assert len(answers) > 5
    assert all(isinstance(json.loads(answer.text), dict) for answer in answers)


def test_whitespace_follows_its_options(bench: GrammarBench) -> None:
    blanks = tuple((ord(char), 9.0) for char in " \n")
    none = grammar(json=POINT, disable_any_whitespace=True)
    two = grammar(json=POINT, whitespace_pattern="[ ]{2}")
    asked = [bench.request(text, logit_bias=(*BIAS[:9], *blanks)) for text in (none, two)]
    compact, wide = bench.run(*asked).values()
    assert re.fullmatch(r'\{"x":-?\d+,"y":-?\d+\}', compact.text)
    assert re.fullmatch(r'\{(?:  )?"x"  :  -?\d+  ,  "y"  :  -?\d+  \}', wide.text)


def test_text_between_structural_tags_is_free(bench: GrammarBench) -> None:
    tag = {
        "type": "structural_tag",
        "triggers": ["<f"],
        "structures": [{"begin": "<fx>", "schema": POINT, "end": "</f>"}],
    }
    bias = ((ord("<"), 12.0), (ord("f"), 12.0), (END, 10.0), *BIAS[1:])
    text = grammar(structural_tag=json.dumps(tag))
    answers = ended(bench, text, 8, logit_bias=bias)
    calls = [call for answer in answers for call in answer.text.split("<f")[1:]]
    assert calls
    for call in calls:
        found = re.match(r"x>(.*?)</f>", call, re.DOTALL)
        assert found
        jsonschema.validate(json.loads(found[1]), POINT)


def reasoned(text: str, is_special: bool, is_certain: bool = True) -> str:
    marks = {"</think>": MARK} if is_special else {}
    return after_reasoning(text, marks, is_certain=is_certain)


ENDING = (*BIAS, (MARK, 4.0))
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "integer"}}, r"-?\d+"),
    ({"regex": "[x-z]{2}"}, "[x-z]{2}"),
    ({"choice": ["left", "right"]}, "left|right"),
    ({"grammar": 'root ::= "o" root | "k"'}, "o*k"),
]


def test_a_constraint_begins_after_reasoning(bench: GrammarBench) -> None:
    asked = [
        (form, bench.request(reasoned(grammar(**kind), True), seed=seed, logit_bias=ENDING))
        for kind, form in KINDS
        for seed in range(8)
    ]
    found = bench.run(*(request for _, request in asked))
    thoughts = set()
    for form, request in asked:
        answer = found[request.request_id]
        if answer.reason is FinishReason.STOP:
            place = answer.token_ids.index(MARK)
            thoughts.add(text_of(answer.token_ids[:place]))
            said = text_of(answer.token_ids[place + 1 :])
            assert re.fullmatch(rf"\s{{0,4}}(?:{form})", said), said
    assert len(thoughts) > 5


@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize("is_special", [True, False], ids=["control token", "text"])
def test_reasoning_ends_at_its_first_end_mark(
    compiler: GrammarCompiler, is_special: bool, is_certain: bool
) -> None:
    end = [MARK] if is_special else [*b"</think>"]
    form = reasoned(grammar(regex="[0-9]+"), is_special, is_certain)
    start = compiler.compile(form).result()
    for tokens, fits in (
        ([*b"<think>hm {</thin\n", *end, *b"\n\n12"], True),
        ([*b"hm", *end, *b"12"], is_certain),
        ([*b"12"], not is_certain),
        ([*b"<think>hm</think>12", *end, *b"12"], False),
        ([*b"<think>hm", *end, *b"12", *end, *b"12"], False),
    ):
        whole = [*tokens, END]
        assert (start.fork().num_allowed([], whole) == len(whole)) is fits, bytes(tokens[:30])


MIXED = [
    reasoned(grammar(json=POINT), True),
    reasoned(grammar(regex="[a-c]{3,9}"), False, is_certain=False),
    grammar(json=SCHEMAS["pydantic model"]),
    grammar(json=SCHEMAS["array of arrays"]),
    grammar(json=SCHEMAS["$ref recursive list"]),
    grammar(regex="(ab|cd){4,20}"),
    grammar(choice=["yes", "no", "perhaps"]),
    None,
]


def mixed(bench: GrammarBench) -> list[Any]:
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 1.1, "logprobs": 2},
        {"temperature": 0.0},
        {"min_tokens": 8, "bad_words": ((ord("a"), ord("b")),)},
    ]
    return [
        bench.request(
            text, 3 if index % 4 == 0 else 1, b"ab" * (1 + index), seed=index, max_tokens=60, **more
        )
        for index, (text, more) in enumerate(
            (text, more) for text in MIXED for more in changes if more.get("temperature") != 0.0
        )
    ] + [bench.request(text, seed=7, max_tokens=60, temperature=0.0) for text in MIXED]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return drawn_alone(mixed)


@pytest.mark.parametrize("name", by_depth(["preempted, drafts"], [*SETTINGS, "forced"]))
def test_the_same_seed_gives_the_same_tokens(plain: list[list[int]], name: str) -> None:
    assert drawn_in(SETTINGS.get(name, {"speculative": JUMP_FORWARD}), mixed) == plain


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drafts_drawn_from_a_distribution_are_verified_against_the_grammar(method: str) -> None:
    config = replace(DEVICE, draft_sample_method="probabilistic", rejection_sample_method=method)
    with GrammarBench(config) as bench:
        asked = [bench.request(grammar(regex="[a-m0-4]{12}"), seed=seed) for seed in range(8)]
        found = bench.run(*asked, *(bench.request(grammar(json=POINT), seed=s) for s in range(8)))
        stats = bench.scheduler.stats()
    texts = [answer.text for answer in found.values()]
    assert all(re.fullmatch("[a-m0-4]{12}", text) for text in texts[:8])
    for text in texts[8:]:
        jsonschema.validate(json.loads(text), POINT)
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens


def test_every_branch_of_a_request_matches_its_grammar(bench: GrammarBench) -> None:
    found = bench.run(bench.request(grammar(json=POINT), 3, logprobs=1)).values()
    assert len({answer.text for answer in found}) > 1
    for answer in found:
        jsonschema.validate(json.loads(answer.text), POINT)
        assert answer.num_logprobs == len(answer.token_ids)


def test_a_stop_token_ends_only_a_complete_answer(bench: GrammarBench) -> None:
    how = {"stop_token_ids": (MARK,), "logit_bias": ((MARK, 50.0),)}
    answer = answer_to(bench, grammar(json=POINT), **how)
    assert answer.stop_token_id == MARK
    jsonschema.validate(json.loads(answer.text), POINT)


def test_an_answer_that_cannot_continue_ends_before_min_tokens(bench: GrammarBench) -> None:
    answer = answer_to(bench, grammar(choice=["yes"]), min_tokens=20)
    assert (answer.text, answer.reason) == ("yes", FinishReason.STOP)


def test_an_answer_continues_to_min_tokens_if_it_can(bench: GrammarBench) -> None:
    answer = answer_to(bench, grammar(regex="a*"), min_tokens=20, logit_bias=((END, 50.0),))
    assert text_of(answer.token_ids) == "a" * len(answer.text)
    assert len(answer.token_ids) == 21


def test_an_invalid_grammar_fails_only_its_request(bench: GrammarBench) -> None:
    """The API refuses it earlier, but the engine does not rely on that."""
    good, bad = bench.request(grammar(choice=["yes"])), bench.request("start: nothing")
    found = bench.run(bad, good)
    assert found[bad.request_id].reason is FinishReason.ERROR
    assert found[good.request_id].text == "yes"


def test_other_parameters_that_leave_no_token_fail_the_request(bench: GrammarBench) -> None:
    answer = answer_to(bench, grammar(choice=["yes"]), allowed_token_ids=(ord("n"),))
    assert answer.reason is FinishReason.ERROR
    assert "no token may be drawn" in (answer.error or "")


def test_a_grammar_without_a_vocabulary_fails_the_request() -> None:
    with GrammarBench() as bench:
        bench.scheduler.features.pop(0)  # the grammar feature
        answer = answer_to(bench, grammar(choice=["yes"]))
    assert answer.reason is FinishReason.ERROR
    assert "cannot be constrained" in (answer.error or "")


@pytest.mark.parametrize(
    "speculative", [replace(NGRAM, num_speculative_tokens=30), JUMP_FORWARD], ids=["ngram", "none"]
)
def test_forced_tokens_are_accepted_drafts(speculative: SpeculativeConfig) -> None:
    names = ("kilometres", "longitude", "population")
    schema = {
        **NAMED,
        "properties": {name: {"type": "boolean"} for name in names},
        "required": [*names],
    }
    with GrammarBench(speculative) as bench:
        text = grammar(json=schema, disable_any_whitespace=True)
        answer = answer_to(bench, text, prompt=b"?")
        stats = bench.scheduler.stats()
    jsonschema.validate(json.loads(answer.text), schema)
    assert stats.speculation.num_accepted_tokens == stats.speculation.num_draft_tokens > 30
    assert answer.num_outputs < len(answer.token_ids) / 3


def test_drafts_that_the_grammar_forbids_are_not_verified() -> None:
    prompt = b"no no no no yes yes perhaps perhaps " * 3
    config = replace(NGRAM, prompt_lookup_min=1)
    with GrammarBench(config) as bench:
        asked = [bench.request(grammar(regex="[a-z ]{40}"), 1, prompt, seed=s) for s in range(4)]
        for answer in bench.run(*asked).values():
            assert re.fullmatch("[a-z ]{40}", answer.text)
