"""What constrained decoding costs: llguidance, xgrammar, and steps of the engine with masks.

    python -m benchmarks.structured_outputs libraries [--vocab 49152 151936]
    python -m benchmarks.structured_outputs steps [--model PATH] [--sequences 1 16]

`libraries`: the time to make the vocabulary, to compile (with the first mask), and CPU of a mask
(mean, 99th percentile, worst) along random walks through each grammar; and which keywords of JSON
Schema each library enforces, refuses, or takes and ignores. xgrammar is measured if it is
installed. The vocabulary of 49,152 is the default model's, the larger one is made of it by joining
its tokens.

`steps`: tokens/s of a real engine that answers without a schema, with one that forces nothing, and
with one of long names, whose tokens are forced; CPU of a token, which a shared machine disturbs
less; and how many steps an answer takes. No drafter.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from fleet.models import default_model_path
from worker.config import EngineConfig, SchedulerConfig
from worker.engine.grammar import GrammarCompiler, allows
from worker.engine.messages import AddRequest, Vocabulary
from worker.types import SamplingParams

PERSON = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
}
WIDE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {f"field_{i}": {"type": ["string", "integer"]} for i in range(100)},
}
NAMES = ("population_density_per_square_kilometre", "is_member_of_the_european_union")
# What answers of `steps` match; none of them ever ends.
FORMS = {
    "a schema": {"type": "string"},
    "long names": {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": "boolean"} for name in NAMES},
        "required": [*NAMES],
    },
}
EBNF = 'root ::= expr\nexpr ::= term ([+*-] term)*\nterm ::= [0-9]+ | "(" expr ")" | [a-z]+'
GRAMMARS: dict[str, tuple[str, Any]] = {
    "json_object": ("json", {"type": "object"}),
    "schema, 5 fields": ("json", PERSON),
    "schema, 100 fields": ("json", WIDE),
    "regex": ("regex", r"[A-Z][a-z]{2,20} [0-9]{4}-[0-9]{2}"),
    "EBNF": ("grammar", EBNF),
}
# What an enforcing library must not allow.
KEYWORDS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"type": "integer"}, '"a"'),
    "enum": ({"enum": [1, 2]}, "3"),
    "const": ({"const": "x"}, '"y"'),
    "minimum": ({"type": "integer", "minimum": 5}, "4"),
    "maximum": ({"type": "integer", "maximum": 5}, "6"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, "5"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, "5"),
    "minimum of number": ({"type": "number", "minimum": 0.5}, "0.4"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
    "minLength": ({"type": "string", "minLength": 2}, '"a"'),
    "maxLength": ({"type": "string", "maxLength": 2}, '"abc"'),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"b"'),
    "pattern with maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    "format date": ({"type": "string", "format": "date"}, '"x"'),
    "format unknown": ({"type": "string", "format": "postcode"}, '"x"'),
    "items": ({"type": "array", "items": {"type": "integer"}}, '["a"]'),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}]}, '["a"]'),
    "minItems": ({"type": "array", "minItems": 2}, "[1]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1, 2]"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1, 1]"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "[2]"),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, "[1]"),
    "properties": ({"type": "object", "properties": {"a": {"type": "null"}}}, '{"a": 1}'),
    "required": ({"type": "object", "required": ["a"]}, "{}"),
    "additionalProperties": ({"type": "object", "additionalProperties": False}, '{"a": 1}'),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
        '{"ab": 1}',
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"ab": 1}'),
    "minProperties": ({"type": "object", "minProperties": 1}, "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 2}'),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": False}}, '{"a": 1}'),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, '{"a": 1}'),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, '"a"'),
    "oneOf, disjoint": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, '"a"'),
    "oneOf, overlapping": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1"),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, "2"),
    "not": ({"not": {"type": "integer"}}, "1"),
    "if": ({"if": {"type": "integer"}, "then": {"minimum": 5}}, "4"),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, "1"),
    "$ref beside keywords": (
        {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}},
        '"ab"',
    ),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}, "[["),
}


class Walk(Protocol):
    """One output under construction."""

    def mask(self) -> bytes:
        """What may follow."""
        ...

    def take(self, token: int) -> None:
        """It did."""
        ...


class Library(Protocol):
    """A library with a vocabulary."""

    def compile(self, kind: str, spec: Any) -> Callable[[], Walk]:
        """Raises ValueError when it refuses."""
        ...


class Guidance:
    """llguidance as the worker uses it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = GrammarCompiler(vocabulary, 1)
        self._compiler.compile("start: /a/").result()

    def compile(self, kind: str, spec: Any) -> Callable[[], Walk]:
        from worker.api.schema.constraints import Constraint, grammar_of
        from worker.api.schema.requests import StructuredOutputs
        from worker.errors import RequestError

        try:
            text = grammar_of(Constraint(StructuredOutputs(**{kind: spec}), kind))
        except RequestError as error:
            raise ValueError(error.message) from error
        future: Future[Any] = self._compiler.compile(text)
        matcher = future.result()
        if matcher.error is not None:
            raise ValueError(matcher.error)
        return lambda: _GuidanceWalk(matcher.fork())


class _GuidanceWalk:
    _params = SamplingParams(max_tokens=1 << 20)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._outputs: list[int] = []

    def mask(self) -> bytes:
        [mask] = self._matcher.masks(self._outputs, (), self._params)
        return bytes(mask)

    def take(self, token: int) -> None:
        self._outputs.append(token)


class XGrammar:
    """xgrammar with its own defaults."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo(
            vocabulary.token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.token_bytes),
            stop_token_ids=vocabulary.eos_token_ids,
        )
        self._size = len(vocabulary.token_bytes)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, spec: Any) -> Callable[[], Walk]:
        compiler = self._compiler
        try:
            if kind == "json":
                compiled = compiler.compile_json_schema(json.dumps(spec), strict_mode=False)
            elif kind == "regex":
                compiled = compiler.compile_regex(spec)
            else:
                compiled = compiler.compile_grammar(spec)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return lambda: _XGrammarWalk(self._library, compiled, self._size)


class _XGrammarWalk:
    def __init__(self, library: Any, compiled: Any, size: int) -> None:
        self._matcher = library.GrammarMatcher(compiled)
        self._bits = library.allocate_token_bitmask(1, size)

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._bits)
        return bytes(self._bits.numpy().tobytes())

    def take(self, token: int) -> None:
        assert self._matcher.accept_token(token)


def vocabulary_of(model: Path, size: int) -> Vocabulary:
    """The model's own tokens, then random pairs of them up to `size`."""
    from worker.tokenizer.checkpoint import read_checkpoint
    from worker.tokenizer.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(read_checkpoint(model))
    own = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    special = sorted(tokenizer.special_ids)
    plain = [word for i, word in enumerate(own) if word and i not in tokenizer.special_ids]
    rng = random.Random(0)
    seen = set(own)
    while len(own) < size:
        word = rng.choice(plain) + rng.choice(plain)
        if word not in seen and len(word) < 20:
            seen.add(word)
            own.append(word)
    return Vocabulary(own, special, [2])


def walk_times(start: Callable[[], Walk], size: int, num_masks: int, rng: random.Random) -> list:
    """CPU seconds of each mask along random walks that prefer what closes."""
    seconds: list[float] = []
    while len(seconds) < num_masks:
        walk = start()
        for _ in range(200):
            began = time.thread_time()
            mask = walk.mask()
            seconds.append(time.thread_time() - began)
            token = _any(mask, size, rng)
            if token == 2 or len(seconds) >= num_masks:
                break
            walk.take(token)
    return seconds


def _any(mask: bytes, size: int, rng: random.Random) -> int:
    for _ in range(300):
        token = rng.randrange(size)
        if allows(mask, token):
            return token
    return rng.choice([token for token in range(size) if allows(mask, token)])


def refuses(start: Callable[[], Walk], vocabulary: Vocabulary, text: str) -> bool:
    """Whether the whole text is not an answer, spelled byte by byte."""
    spelled = {word: i for i, word in enumerate(vocabulary.token_bytes) if len(word) == 1}
    walk = start()
    for byte in text.encode():
        if not allows(walk.mask(), spelled[bytes((byte,))]):
            return True
        walk.take(spelled[bytes((byte,))])
    return not allows(walk.mask(), vocabulary.eos_token_ids[0])


def libraries() -> Iterator[tuple[str, Callable[[Vocabulary], Library]]]:
    """Those that are installed."""
    yield "llguidance", Guidance
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        return
    yield "xgrammar", XGrammar


def measure_libraries(model: Path, sizes: Sequence[int], num_masks: int) -> None:
    """Print a table for each size, then one of keywords."""
    print("| vocabulary | library | grammar | compile ms | mask µs mean | p99 | worst |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        vocabulary = vocabulary_of(model, size)
        for name, build in libraries():
            began = time.perf_counter()
            library = build(vocabulary)
            made = time.perf_counter() - began
            print(f"| {size} | {name} | (vocabulary) | {made * 1e3:.0f} | | | |")
            for label, (kind, spec) in GRAMMARS.items():
                began = time.perf_counter()
                start = library.compile(kind, spec)
                start().mask()
                compiled = time.perf_counter() - began
                times = sorted(walk_times(start, size, num_masks, random.Random(1)))
                mean, p99 = statistics.fmean(times), times[int(len(times) * 0.99)]
                row = f"{compiled * 1e3:.1f} | {mean * 1e6:.0f} | {p99 * 1e6:.0f}"
                print(f"| {size} | {name} | {label} | {row} | {times[-1] * 1e6:.0f} |")
    print_keywords(vocabulary_of(model, 0))


def print_keywords(vocabulary: Vocabulary) -> None:
    """Which keywords are enforced, refused and ignored."""
    for name, build in libraries():
        library = build(vocabulary)
        found: dict[str, list[str]] = {"enforced": [], "refused": [], "ignored": []}
        for label, (schema, wrong) in KEYWORDS.items():
            try:
                start = library.compile("json", schema)
                kind = "enforced" if refuses(start, vocabulary, wrong) else "ignored"
            except ValueError:
                kind = "refused"
            found[kind].append(label)
        for kind, labels in found.items():
            print(f"{name}: {kind} {len(labels)} of {len(KEYWORDS)}: {', '.join(labels)}")


def measure_steps(model: Path, batches: Sequence[int], num_tokens: int) -> None:
    """Tokens/s and CPU with schemas and without, each the best of three runs, taken in turns."""
    from worker.api.schema.constraints import Constraint, grammar_of
    from worker.api.schema.requests import StructuredOutputs
    from worker.engine.process import build_core

    grammars: dict[str, str | None] = {"without": None}
    for name, form in FORMS.items():
        schema = {"type": "array", "items": form, "minItems": 10_000}
        outputs = StructuredOutputs(json=schema, disable_any_whitespace=True)
        grammars[name] = grammar_of(Constraint(outputs, "json"))
    limits = SchedulerConfig(max_model_len=1024, max_num_seqs=max(batches))
    config = EngineConfig(
        "torch", str(model), scheduler=limits, eos_token_ids=(2,), kv_cache_memory_bytes=1 << 30
    )
    core, _ = build_core(config)
    core.take_vocabulary(vocabulary_of(model, 0))
    best: dict[tuple[int, str], tuple[float, float, float]] = {}
    for _ in range(3):
        for count in batches:
            for name, grammar in grammars.items():
                params = SamplingParams(
                    num_tokens, seed=1, logit_bias=((2, -100.0),), grammar=grammar
                )
                found, before = _rate(core, count, params), best.get((count, name))
                if before is not None:
                    found = max(found[0], before[0]), min(found[1], before[1]), found[2]
                best[count, name] = found
    print("| sequences | answers | tokens/s | ratio | CPU ms a token | steps for 100 tokens |")
    print("|---|---|---|---|---|---|")
    for (count, name), (rate, seconds, steps) in best.items():
        ratio = f"{rate / best[count, 'without'][0]:.3f}"
        figures = f"{rate:.1f} | {ratio} | {seconds * 1e3:.2f} | {100 * steps:.0f}"
        print(f"| {count} | {name} | {figures} |")
    core.shutdown()


def _rate(core: Any, count: int, params: SamplingParams) -> tuple[float, float, float]:
    """Tokens/s, CPU seconds of a token, and steps for a token of each sequence, once the prompts
    have been run.
    """
    for index in range(count):
        core.add(AddRequest(f"{index}", list(range(100 + index, 132 + index)), params, 0.0))
    began, cpu, drawn, num_steps = 0.0, 0.0, 0, 0
    while core.has_work:
        told = core.step()
        if told is None or not told.num_scheduled_tokens:
            continue
        drawn += sum(len(output.token_ids) for output in told.outputs)
        num_steps += 1
        if not began:  # the prompts have been run
            began, cpu, drawn, num_steps = time.perf_counter(), time.process_time(), 0, 0
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return drawn / seconds, cpu / drawn, num_steps * count / drawn


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("libraries", "steps"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--masks", type=int, default=2000)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    model = arguments.model or default_model_path()
    if arguments.what == "libraries":
        measure_libraries(model, arguments.vocab, arguments.masks)
    else:
        measure_steps(model, arguments.sequences, arguments.tokens)


if __name__ == "__main__":
    main()
