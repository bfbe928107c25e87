"""The cost of constrained decoding: llguidance, xgrammar, and steps of the engine with masks.

    python benchmarks/structured_outputs.py libraries [--vocab 49152,151936]
    python benchmarks/structured_outputs.py steps [--model PATH] [--sequences 1,16]

`libraries`: the time to make the vocabulary, to compile (with the first mask), and CPU of a mask
(mean, 99th percentile, worst) along random walks through each grammar; and the schemas of the JSON
Schema Test Suite with invalid instances that each library enforces, refuses, or takes and ignores.
xgrammar is measured if it is installed. The vocabulary of 49,152 is the default model's, the larger
one is made of it by joining its tokens.

`steps`: tokens/s of a real engine that answers without a schema, with one that forces nothing, and
with one of long names, whose tokens are forced; CPU of a token, which a shared machine disturbs
less; and the steps of an answer. No drafter.

Prints tables and writes benchmarks/results/structured_outputs.json.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import DEFAULT_MODEL, Table, command_line, numbers, write_results

from worker.api.schema.constraints import Constraint, grammar_of
from worker.api.schema.requests import StructuredOutputs
from worker.config import EngineConfig, SchedulerConfig
from worker.engine.messages import AddRequest, Vocabulary
from worker.engine.process.build import build_core
from worker.engine.sequences.grammar import GrammarCompiler, allows
from worker.errors import RequestError
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer
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
# Schemas of the answers of `steps`, none of which ever ends.
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
# Groups of the JSON Schema Test Suite: [keyword, description, schema, [[is valid, instance], …]].
SUITE = Path(__file__).parents[1] / "tests" / "data" / "json_schema_test_suite.jsonl"


def grammar_text(kind: str, spec: Any, **options: Any) -> str:
    """A grammar as the API process hands it to the engine. Raises ValueError when it refuses."""
    try:
        return grammar_of(Constraint(StructuredOutputs(**{kind: spec}, **options), kind))
    except RequestError as error:
        raise ValueError(error.message) from error


class Guidance:
    """llguidance as the worker uses it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = GrammarCompiler(vocabulary, 1)
        self._compiler.compile("start: /a/").result()

    def compile(self, kind: str, spec: Any) -> Callable[[], Any]:
        """A maker of outputs under construction. Raises ValueError when it refuses."""
        matcher = self._compiler.compile(grammar_text(kind, spec)).result()
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

        self._library, self._size = xgrammar, len(vocabulary.token_bytes)
        info = xgrammar.TokenizerInfo(
            vocabulary.token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=self._size,
            stop_token_ids=vocabulary.eos_token_ids,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, spec: Any) -> Callable[[], Any]:
        """The same as `Guidance.compile`."""
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


LIBRARIES: dict[str, Callable[[Vocabulary], Any]] = {"llguidance": Guidance}
if find_spec("xgrammar") is not None:
    LIBRARIES["xgrammar"] = XGrammar


def vocabulary_of(model: Path, size: int) -> Vocabulary:
    """The model's own tokens, then random pairs of them up to `size`."""
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


def walk_times(start: Callable[[], Any], size: int, num_masks: int, rng: random.Random) -> list:
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


def refuses(start: Callable[[], Any], vocabulary: Vocabulary, text: str) -> bool:
    """True unless the whole text is an answer, spelled byte by byte."""
    spelled = {word: i for i, word in enumerate(vocabulary.token_bytes) if len(word) == 1}
    walk = start()
    for byte in text.encode():
        if not allows(walk.mask(), spelled[bytes((byte,))]):
            return True
        walk.take(spelled[bytes((byte,))])
    return not allows(walk.mask(), vocabulary.eos_token_ids[0])


def measure_libraries(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times by vocabulary, library and grammar, then the keywords of JSON Schema."""
    times = ("compile_ms .1f", "mask_us .0f", "p99_us .0f", "worst_us .0f")
    table = Table("vocabulary", "library <12", "grammar <20", *times)
    for size in options.vocab:
        vocabulary = vocabulary_of(options.model, size)
        for name, build in LIBRARIES.items():
            began = time.perf_counter()
            library = build(vocabulary)
            made = {"compile_ms": 1e3 * (time.perf_counter() - began)}
            made |= {"mask_us": None, "p99_us": None, "worst_us": None}
            table.add(vocabulary=size, library=name, grammar="(the vocabulary)", **made)
            for label, (kind, spec) in GRAMMARS.items():
                began = time.perf_counter()
                start = library.compile(kind, spec)
                start().mask()
                compiled = time.perf_counter() - began
                masks = sorted(walk_times(start, size, options.masks, random.Random(1)))
                row = {
                    "compile_ms": 1e3 * compiled,
                    "mask_us": 1e6 * statistics.fmean(masks),
                    "p99_us": 1e6 * masks[int(len(masks) * 0.99)],
                    "worst_us": 1e6 * masks[-1],
                }
                table.add(vocabulary=size, library=name, grammar=label, **row)
    return table.rows + enforcement(vocabulary_of(options.model, 0))


def enforcement(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The schemas of the suite that each library enforces, refuses and ignores, by keyword."""
    rows = []
    for name, build in LIBRARIES.items():
        library = build(vocabulary)
        found = {kind: Counter[str]() for kind in ("enforced", "refused", "ignored")}
        for line in SUITE.read_text(encoding="utf-8").splitlines():
            keyword, _, schema, tests = json.loads(line)
            wrong = [json.dumps(instance) for is_valid, instance in tests if not is_valid]
            if not wrong:
                continue
            try:
                start = library.compile("json", schema)
                refusals = [refuses(start, vocabulary, text) for text in wrong]
                kind = "enforced" if all(refusals) else "ignored"
            except ValueError:
                kind = "refused"
            found[kind][keyword] += 1
        for kind, counts in found.items():
            total = f"{name}: {kind} {counts.total()} schemas"
            print(total + ": " + ", ".join(f"{key} {n}" for key, n in counts.items()))
        rows.append({"library": name, **found})
    return rows


def measure_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s and CPU with schemas and without, each the best of some runs, taken in turns."""
    grammars: dict[str, str | None] = {"without": None}
    for name, form in FORMS.items():
        schema = {"type": "array", "items": form, "minItems": 10_000}
        grammars[name] = grammar_text("json", schema, disable_any_whitespace=True)
    limits = SchedulerConfig(max_model_len=1024, max_num_seqs=max(options.sequences))
    model = str(options.model)
    config = EngineConfig(
        "torch", model, scheduler=limits, eos_token_ids=(2,), kv_cache_memory_bytes=1 << 30
    )
    core, _ = build_core(config)
    core.take_vocabulary(vocabulary_of(options.model, 0))
    best: dict[tuple[int, str], tuple[float, float, float]] = {}
    for _ in range(options.runs):
        for count in options.sequences:
            for name, grammar in grammars.items():
                bias = ((2, -100.0),)  # no answer ends
                params = SamplingParams(options.tokens, seed=1, logit_bias=bias, grammar=grammar)
                found = _rate(core, count, params)
                before = best.get((count, name), found)
                best[count, name] = (max(found[0], before[0]), min(found[1], before[1]), found[2])
    core.shutdown()
    figures = (
        "tokens_per_second .1f",
        "ratio .3f",
        "cpu_ms_a_token .2f",
        "steps_for_100_tokens .0f",
    )
    table = Table("sequences", "answers <12", *figures)
    for (count, name), (rate, seconds, steps) in best.items():
        table.add(
            sequences=count,
            answers=name,
            tokens_per_second=rate,
            ratio=rate / best[count, "without"][0],
            cpu_ms_a_token=1e3 * seconds,
            steps_for_100_tokens=100 * steps,
        )
    return table.rows


def _rate(core: Any, count: int, params: SamplingParams) -> tuple[float, float, float]:
    """Tokens/s, CPU seconds of a token, and steps for a token of each sequence, once the prompts
    have been run.
    """
    for index in range(count):
        core.add(AddRequest(f"{index}", list(range(100 + index, 132 + index)), params, 0.0))
    began, cpu, drawn, num_steps = 0.0, 0.0, 0, 0
    while core.has_work:
        step = core.step()
        if step is None or not step.num_scheduled_tokens:
            continue
        drawn += sum(len(output.token_ids) for output in step.outputs)
        num_steps += 1
        if not began:  # the prompts have been run
            began, cpu, drawn, num_steps = time.perf_counter(), time.process_time(), 0, 0
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return drawn / seconds, cpu / drawn, num_steps * count / drawn


def main() -> None:
    """Measure one of the two."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("libraries", "steps"))
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--vocab", type=numbers(int), default=[49152, 151936])
    parser.add_argument("--masks", type=int, default=2000)
    parser.add_argument("--sequences", type=numbers(int), default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3, help="of steps; the best one counts")
    options = parser.parse_args()
    rows = (measure_libraries if options.what == "libraries" else measure_steps)(options)
    write_results(options, rows=rows)


if __name__ == "__main__":
    main()
