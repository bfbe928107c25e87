"""The gain of speculation: tokens per second of plain decoding and of each method, side by side.

    python benchmarks/speculation.py                          # everything, an hour on two cores
    python benchmarks/speculation.py --quick                  # does it work? a few minutes
    python benchmarks/speculation.py --methods ngram --batches 1 --workloads repeating

Workloads (`speculation_prompts.yaml`): *repeating* texts, *open* chat, and *random* tokens drawn at
a temperature at which nothing repeats; at batch sizes above 1 also two mixes of them. Every engine
is built as a worker builds it, lives as long as the run, and is asked for the same answers, without
a prefix cache. Suffix drafts see finished outputs of the same workload and round only: no answer
was seen before.

On a shared machine speeds drift, so all engines decode the same job in turns of two tokens of
each answer, in a random order; between its turns an engine and its clock pause. `speed-up`
is the ratio of decoding times (after the first token) over the whole workload, each job's the
median over rounds; `±` is its standard error, from the differences of rounds (two at least); `cpu`
is the same ratio in CPU seconds, which other programs on the machine change less; `whole` counts
the prompts in. The answers are compared token for token: `differ` counts requests whose answers are
not the same, and should be 0. All run on the same weights. Two engines decode without drafts, and
methods are compared with their mean; `plain again` is the second over the first: the difference of
two engines that are alike.

Prints a table and writes benchmarks/results/speculation.json.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from measuring import DEFAULT_MODEL, Table, command_line, numbers, write_results

# Before torch is imported, as a worker with speculation does it: waiting threads must not spin on a
# shared machine, and steps with drafts have many numbers of rows.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import torch
from speculation_runs import Request, Shared, Subject, Tally, engine_config, side_by_side

from worker.cli.speculation import parse
from worker.config import SpeculativeConfig
from worker.errors import WorkerError
from worker.tokenizer.chat import chat_template_of
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer
from worker.types import SamplingParams

SEED = 20261126
PROMPTS = Path(__file__).with_name("speculation_prompts.yaml")
RANDOM_PROMPTS, RANDOM_PROMPT_TOKENS, RANDOM_TEMPERATURE = 16, 64, 1.5
CONTROL = "plain again"
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 12, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"num_speculative_tokens": 16},
    "eagle": {"num_speculative_tokens": 4},
    "draft_model": {"num_speculative_tokens": 4},
}
WARM_UP_TOKENS = 24
STEPS_A_TURN = 2
BATCH_ROUNDS = 3
COLUMNS = (
    *("workload <20", "batch", "method <12", "plain/s .1f", "with/s .1f", "speed-up .3f"),
    *("± .1%", "cpu .2f", "whole .2f", "accepted .1%", "length .2f", "tok/step .2f"),
    *("mean_k .2f", "differ"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's turn of a conversation, or a text to be completed."""

    text: str
    is_chat: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind, to be run `batch` at a time."""

    name: str
    batch: int
    requests: tuple[Request, ...]

    @property
    def jobs(self) -> Iterator[tuple[Request, ...]]:
        """Requests that run together. A rest that does not fill a batch is left out."""
        for first in range(0, len(self.requests) - self.batch + 1, self.batch):
            yield self.requests[first : first + self.batch]


# ---- the workloads ------------------------------------------------------------------------------


class Texts:
    """Prompts as the model's tokenizer and template make them."""

    def __init__(self, model: Path) -> None:
        checkpoint = read_checkpoint(model)
        self.eos_token_ids = checkpoint.eos_token_ids
        self._vocab_size = checkpoint.vocab_size
        self._tokenizer = build_tokenizer(checkpoint)
        self._template = chat_template_of(checkpoint, lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def requests(
        self, prompts: Sequence[Prompt], max_tokens: int, temperature: float
    ) -> tuple[Request, ...]:
        """One request for each."""
        return tuple(
            Request(self._tokens(prompt), SamplingParams(max_tokens, temperature, seed=index))
            for index, prompt in enumerate(prompts)
        )

    def random(self, count: int, max_tokens: int) -> tuple[Request, ...]:
        """Random tokens, continued at a high temperature."""
        rng = random.Random(SEED)
        return tuple(
            Request(
                tuple(rng.randrange(17, self._vocab_size) for _ in range(RANDOM_PROMPT_TOKENS)),
                SamplingParams(max_tokens, RANDOM_TEMPERATURE, seed=index, ignore_eos=True),
            )
            for index in range(count)
        )

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        text = prompt.text
        if prompt.is_chat and self._template is not None:
            text = self._template.render([{"role": "user", "content": text}])
        return tuple(self._tokenizer.encode(text, add_special_tokens=not prompt.is_chat))


def workloads(texts: Texts, options: argparse.Namespace) -> list[Workload]:
    """Every workload at every batch size; larger batches take their requests in turn."""
    length, count = options.max_tokens, 2 if options.quick else None
    prompts = yaml.safe_load(PROMPTS.read_text(encoding="utf-8"))
    repeating = [Prompt(one["text"], one.get("is_chat", True)) for one in prompts["repeating"]]
    chats = [Prompt(text) for text in prompts["open"]]
    kinds = {
        "repeating": texts.requests(repeating[:count], length, options.temperature),
        "open": texts.requests(chats[:count], length, options.temperature),
        "random": texts.random(count or RANDOM_PROMPTS, min(length, 96)),
    }
    made = []
    for batch in options.batches:
        named = dict(kinds)
        if batch > 1 and not options.quick:
            mixed = [kinds[name] for name in ("repeating", "open", "random")]
            named["a third each"] = tuple(r for group in zip(*mixed, strict=True) for r in group)
            some = kinds["repeating"][: max(batch // 8, 1)]
            named["one in eight repeats"] = (*some, *kinds["random"])
        for name, requests in named.items():
            if options.workloads and name not in options.workloads:
                continue
            enough = requests * -(-batch // len(requests)) if batch > 1 else requests
            made.append(Workload(name, batch, enough[: max(batch, len(requests))]))
    return made


# ---- measuring ----------------------------------------------------------------------------------


def subjects(options: argparse.Namespace, texts: Texts) -> dict[str, Subject]:
    """Plain decoding first, then each method that is available here."""
    found: dict[str, Subject] = {}
    shared = Shared()
    for name in ("plain", *options.methods, CONTROL):
        speculative = None
        try:
            if name not in ("plain", CONTROL):
                speculative = method_config(name, options)
            config = engine_config(
                options.model, options.dtype, options.threads, texts.eos_token_ids, speculative
            )
            found[name] = Subject.build(name, config, shared)
        except WorkerError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def method_config(name: str, options: argparse.Namespace) -> SpeculativeConfig:
    """The configuration of `--speculative-config` with a method's settings here."""
    given = {"method": name, **METHODS[name]}
    if name == "draft_model":
        given["model"] = str(options.draft_model or options.model)
    if name == "eagle" and options.head is not None:
        given["model"] = str(options.head)
    given |= json.loads(options.settings).get(name, {})
    return parse(given)


def warm_up(engines: dict[str, Subject], texts: Texts, batches: Sequence[int]) -> None:
    """Let every engine see each batch size once: kernels are chosen, step times learned."""
    prompts = [Prompt(f"Count from {n} to one hundred.") for n in range(8)]
    for batch in batches:
        job = texts.requests((prompts * batch)[:batch], WARM_UP_TOKENS, 0.0)
        for engine in engines.values():
            engine.run(job, "warm-up")


def measure(workload: Workload, engines: dict[str, Subject], rounds: int) -> dict[str, Tally]:
    """Every method on every job, side by side with plain decoding."""
    rng = random.Random(f"{SEED} {workload.name} {workload.batch}")
    tallies = {name: Tally() for name in engines}
    for count in range(rounds):
        tenant = f"{workload.name} {workload.batch} {count}"
        for index, job in enumerate(workload.jobs):
            outcomes = side_by_side(list(engines.values()), job, tenant, STEPS_A_TURN, rng)
            for name, outcome in zip(engines, outcomes, strict=True):
                plain = outcomes[:1] if name == CONTROL else [outcomes[0], outcomes[-1]]
                tallies[name].add(index, plain, outcome)
    return {name: tallies[name] for name in list(engines)[1:]}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The methods against plain decoding on the model."""
    torch.manual_seed(SEED)
    texts = Texts(options.model)
    engines = subjects(options, texts)
    warm_up(engines, texts, options.batches)
    table = Table(*COLUMNS)
    for workload in workloads(texts, options):
        rounds = options.rounds or (1 if workload.batch == 1 else BATCH_ROUNDS)
        for method, tally in measure(workload, engines, rounds).items():
            figures = {"rounds": rounds, **tally.row()}
            table.add(workload=workload.name, batch=workload.batch, method=method, **figures)
    differing, total = (sum(row[key] for row in table.rows) for key in ("differ", "requests"))
    print(f"{differing} of {total} speculative answers differ from the plain ones")
    for engine in engines.values():
        engine.shutdown()
    return table.rows


def names(text: str) -> list[str]:
    """Parse a list of comma-separated names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main() -> None:
    """Measure, print the table and write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--methods", type=names, default=["ngram", "suffix", "eagle"])
    parser.add_argument("--workloads", type=names, default=[])
    parser.add_argument("--batches", type=numbers(int), default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, help="default: 1; of batches, 3")
    parser.add_argument("--temperature", type=float, default=0.0, help="of repeating and open")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--settings", default="{}", help='{"ngram": {"prompt_lookup_min": 3}}')
    parser.add_argument("--head", type=Path, help="a trained head; else the one that is shipped")
    parser.add_argument("--draft-model", type=Path, help="for draft_model; else the model itself")
    parser.add_argument("--quick", action="store_true", help="two short requests of each kind")
    options = parser.parse_args()
    if options.quick:
        options.max_tokens, options.rounds = min(options.max_tokens, 16), 1
    unknown = set(options.methods) - set(METHODS)
    if unknown:
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}; known: {', '.join(METHODS)}")
    write_results(options, torch=torch.__version__, rows=compare(options))


if __name__ == "__main__":
    main()
