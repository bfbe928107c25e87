"""What adaptive draft lengths bring, and what they lose at worst, on machines of known step times.

    python benchmarks/speculation_virtual.py [--seeds 4] [--machines cliff] [--methods ngram]

The production speculation (drafters and adaptive lengths) decodes recorded answers of the default
model, 16 at a time, in virtual time: each machine is a table of what a step takes by its number of
tokens. What the speculation is told of a step takes noise, as steps do on a shared machine: a few
are late, the speed drifts, and now and then (`--jumps`) it is another one at once. Compared are the
true times, with drafts and without, so the ratio is exact and the same wherever this runs.
`speculation.py` measures the real engine on a real machine.

Machines, by what drafts cost in a step of 16 sequences:

    amx       5 % for one, 30 for 16, 130 for 48
    cliff     14 % for one, 44 for 16, 136 for 48
    lin       2.2 % for each

Workloads as in `speculation.py`, in two modes:

    job       16 requests begin together; the time until the last has ended, nobody takes a place
              that becomes free. A workload of more requests is several jobs, one after the other
    full      whoever ends is replaced; only steps of 16 count. The requests come in an order of
              chance, often enough for some hundred steps, each time as another tenant's: no draft
              comes from an answer that was given before

Every workload is decoded by an engine that just saw its warm-up; after `repeating`, by one that has
won much; three times, after three times `repeating`; and all in a row. Each time it is decoded is a
run of its own. The time of prompts is not counted. The answers are recorded with the plain engine
when there are none (half a minute) or they were made from something else, or with `--record`.

Prints the time of plain decoding over that with drafts (below 1: drafts lose), by mean, 5th
percentile and minimum over runs, and the drafts of a step; writes
benchmarks/results/speculation_virtual.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

from speculation import DEFAULT_MODEL, METHODS, WARM_UP_TOKENS, Texts, workloads
from speculation_runs import Request, SharedWeights, Subject, engine_config

from worker.engine.drafters.registry import build_drafter
from worker.engine.messages import AddRequest
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.speculation import Guess, Speculation
from worker.speculation_flags import parse
from worker.types import ModelOutput

SEED = 20261126
RESULTS = Path(__file__).parent / "results"
ANSWERS = RESULTS / "speculation_answers.json"
HOST_METHODS = ("ngram", "suffix")  # whose drafters need no model
BATCH, MAX_TOKENS = 16, 96
MAX_STEP_TOKENS = 4096
FULL_REQUESTS = 64  # at least so many go through a full engine
BAD = 0.97

# Seconds of a step by its number of tokens: straight lines between these, and on.
MACHINES: dict[str, tuple[tuple[int, float], ...]] = {
    "amx": (
        *((1, 0.0331), (3, 0.0408), (5, 0.049), (8, 0.0564), (12, 0.0632), (14, 0.0639)),
        *((16, 0.0683), (17, 0.0717), (20, 0.0755), (24, 0.0816), (32, 0.0891), (40, 0.0966)),
        *((48, 0.119), (64, 0.1564), (88, 0.1904), (112, 0.2108)),
    ),
    "cliff": (
        *((1, 0.038), (2, 0.04), (3, 0.043), (4, 0.045), (8, 0.057), (12, 0.063), (15, 0.0655)),
        *((16, 0.066), (17, 0.075), (20, 0.079), (24, 0.085), (32, 0.095), (41, 0.112)),
        *((57, 0.148), (81, 0.175), (113, 0.205)),
    ),
    "lin": ((1, 0.052), (4, 0.061), (16, 0.089), (4096, 8.249)),
}
PROMPT_TOKEN = {"amx": 0.0013, "cliff": 0.0013, "lin": 0.0017}  # seconds, in a long prompt
AHEAD = 0.99  # of that, when a step is scheduled while another runs: without drafts
SPREAD, LATE, LATEST = 0.05, 0.05, 3.0  # of a step's log time; how many are late, how much at most
DRIFT, RETURN = 0.004, 0.01  # of the speed's logarithm in a step; of what it is off
JUMPS = 1 / 30  # of the speed, in a step


@dataclass(frozen=True, slots=True)
class Unrest:
    """What else runs on a machine, which changes now and then: `jumps` is the spread of the log
    speed, `contention` that of how often the memory that is read in any step takes as long again.
    """

    jumps: float
    contention: float


class Machine:
    """What steps take on a machine, and what a clock shows of it."""

    def __init__(self, name: str, unrest: Unrest, rng: Random) -> None:
        self._lines = list(pairwise(MACHINES[name]))
        self._prompt_token = PROMPT_TOKEN[name]
        self._rng = rng
        self._unrest = unrest
        self._speed = self._level = 0.0
        self._waiting = 0.0  # for memory, in any step

    def seconds(self, num_tokens: int, is_ahead: bool) -> float:
        """What a step of so many tokens truly takes just now."""
        reaching = (line for line in self._lines if num_tokens <= line[1][0])
        (left, low), (right, high) = next(reaching, self._lines[-1])
        seconds = low + (high - low) * (num_tokens - left) / (right - left) + self._waiting
        return seconds * AHEAD if is_ahead else seconds

    def prompts(self, num_tokens: int) -> float:
        """What a step of nothing but prompts takes."""
        return num_tokens * self._prompt_token

    def noise(self) -> float:
        """By how much a step seems to take longer."""
        self._speed += self._rng.gauss(0.0, DRIFT) - RETURN * self._speed
        factor = math.exp(self._rng.gauss(0.0, SPREAD) + self._speed + self._level)
        return factor * self._rng.uniform(1.2, LATEST) if self._rng.random() < LATE else factor

    def change(self) -> None:
        """What else runs on it may be something else from now on."""
        if self._rng.random() < JUMPS:
            self._level = self._rng.gauss(0.0, self._unrest.jumps)
            contention = max(0.0, self._rng.gauss(0.0, self._unrest.contention))
            self._waiting = contention * self._lines[0][0][1]


# ---- what is decoded ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request and the tokens that the model answered it with."""

    request: Request
    answer: tuple[int, ...]

    def begin(self, seq_id: int, tenant: str) -> EngineSequence:
        """A sequence that has its first token."""
        prompt, params = list(self.request.prompt), self.request.params
        asked = AddRequest(str(seq_id), prompt, params, 0.0, tenant=tenant)
        most = len(prompt) + params.max_tokens
        sequence = EngineSequence(seq_id, asked, 0, most, frozenset())
        sequence.append(self.answer[0], 0.0)
        return sequence


def recorded(model: Path, anew: bool) -> dict[str, list[Recorded]]:
    """Every workload with the model's answers, which are recorded when there are none."""
    texts = Texts(model)
    asked = argparse.Namespace(
        max_tokens=MAX_TOKENS, temperature=0.0, quick=False, batches=[BATCH], workloads=[]
    )
    made = workloads(texts, asked)
    requests = list({one.prompt: one for workload in made for one in workload.requests}.values())
    made_from = f"{model.name} {model.stat().st_size} {requests!r}"
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() and not anew else {}
    if known.get("digest") != digest:
        known = {"digest": digest, "answers": record(model, texts, requests)}
        ANSWERS.parent.mkdir(exist_ok=True)
        ANSWERS.write_text(json.dumps(known) + "\n")
    answers = {
        request.prompt: Recorded(request, tuple(answer))
        for request, answer in zip(requests, known["answers"], strict=True)
    }
    return {each.name: [answers[one.prompt] for job in each.jobs for one in job] for each in made}


def record(model: Path, texts: Texts, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What the plain engine answers."""
    print(f"recording what {model.name} answers")
    config = engine_config(model, "auto", None, texts.eos_token_ids, None)
    engine = Subject.build("plain", config, SharedWeights())
    answers: list[tuple[int, ...]] = []
    for first in range(0, len(requests), BATCH):
        answers += engine.run(requests[first : first + BATCH], "recording").answers
    engine.shutdown()
    return answers


# ---- decoding -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Spent:
    """Seconds of decoding the same tokens without drafts and with them, and what was drafted."""

    plain: float = 0.0
    drafting: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0
    num_gained: int = 0  # tokens beyond one for each sequence and step

    @property
    def ratio(self) -> float:
        """Above 1: drafts are faster."""
        return self.plain / self.drafting


Live = list[tuple[EngineSequence, tuple[int, ...]]]  # who decodes, with all of its answer


class Engine:
    """Speculation that lives as long as its machine: what it learns, it keeps."""

    def __init__(self, method: str, machine: Machine) -> None:
        config = parse({"method": method, **METHODS[method]})
        self._speculation = Speculation(config, build_drafter(config), has_device_drafter=False)
        self._machine = machine
        self._count = 0

    def job(self, requests: Sequence[Recorded], tenant: str) -> Spent:
        """They begin together; until the last has ended."""
        live: Live = []
        lengths = [len(one.answer) for one in requests]
        for one in requests:
            self._begin(one, tenant, live)
        self._prompts(live)
        spent, number = Spent(), 1
        while live:
            self._step(live, spent)
            # Plain decoding gets as far as the last one is in the same time of the machine.
            last = min((s.num_outputs for s, _ in live), default=max(lengths))
            for done in range(number, last):
                num_decoding = sum(length > done for length in lengths)
                spent.plain += self._machine.seconds(num_decoding, is_ahead=True)
            number = last
            self._machine.change()
        return spent

    def full(self, requests: Iterable[tuple[Recorded, str]]) -> Spent:
        """Requests with their tenants, a batch at a time; until nobody replaces one that ends."""
        waiting = iter(requests)
        live: Live = []
        spent = Spent()
        while True:
            num_before = len(live)
            while len(live) < BATCH and (one := next(waiting, None)) is not None:
                self._begin(*one, live)
            self._prompts(live[num_before:])
            if len(live) < BATCH:
                break
            num_tokens = self._step(live, spent)
            spent.plain += num_tokens / BATCH * self._machine.seconds(BATCH, is_ahead=True)
            self._machine.change()
        while live:
            self._step(live, Spent())
        return spent

    def _begin(self, one: Recorded, tenant: str, live: Live) -> None:
        sequence = one.begin(self._count, tenant)
        self._count += 1
        if len(one.answer) > 1:
            live.append((sequence, one.answer))
        else:
            self._speculation.end(sequence)

    def _prompts(self, live: Live) -> None:
        """The step that runs their prompts, which is the same with drafts and without."""
        num_tokens = sum(sequence.num_prompt for sequence, _ in live)
        if num_tokens:
            told = self._machine.prompts(num_tokens) * self._machine.noise()
            self._speculation.observe_step((0, num_tokens), 0, told, ModelOutput({}))

    def _step(self, live: Live, spent: Spent) -> int:
        """One step of all that are `live`, of whom those that end leave; how many tokens came."""
        decoding = [sequence for sequence, _ in live]
        may_draft = self._speculation.may_draft(decoding)
        guesses: dict[int, Guess] = {}
        if may_draft:
            guesses = self._speculation.choose(decoding, 0, MAX_STEP_TOKENS - len(decoding))
        num_drafts = sum(len(guess.token_ids) for guess in guesses.values())
        seconds = self._machine.seconds(len(decoding) + num_drafts, is_ahead=not may_draft)
        num_tokens = 0
        for sequence, answer in live:
            tokens = self._take(sequence, answer, guesses.get(sequence.seq_id))
            num_tokens += tokens
            spent.num_gained += tokens - 1
        live[:] = [pair for pair in live if pair[0].num_outputs < len(pair[1])]
        told = seconds * self._machine.noise()
        self._speculation.observe_step((len(decoding), 0), num_drafts, told, ModelOutput({}))
        spent.drafting += seconds
        spent.num_steps += 1
        spent.num_drafts += num_drafts
        return num_tokens

    def _take(self, sequence: EngineSequence, answer: tuple[int, ...], guess: Guess | None) -> int:
        """What a step brings a sequence, which may be its end; how many tokens."""
        coming = answer[sequence.num_outputs :]
        num_accepted = 0
        if guess is not None:
            for draft, token in zip(guess.token_ids, coming, strict=False):
                if draft != token:
                    break
                num_accepted += 1
            self._speculation.verified(sequence, guess, num_accepted)
        for token in coming[: num_accepted + 1]:
            sequence.append(token, 0.0)
        if sequence.num_outputs == len(answer):
            self._speculation.end(sequence)
        return len(coming[: num_accepted + 1])


# ---- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """Workloads that one engine decodes: some to learn from, then those that are looked at."""

    before: tuple[str, ...]
    then: tuple[str, ...]


def orders(names: Sequence[str]) -> Iterator[Order]:
    """Each alone, after repeating, three times after three times repeating; all in a row."""
    for name in names:
        yield Order((), (name,))
        yield Order(("repeating",), (name,))
        yield Order(("repeating",) * 3, (name,) * 3)
    yield Order((), tuple(names))


def in_jobs(engine: Engine, requests: Sequence[Recorded], tenant: str, _: Random) -> Spent:
    """A workload's jobs, one after the other."""
    spent = Spent()
    for first in range(0, len(requests), BATCH):
        job = engine.job(requests[first : first + BATCH], tenant)
        spent = Spent(*(getattr(spent, f.name) + getattr(job, f.name) for f in fields(Spent)))
    return spent


def in_full(engine: Engine, requests: Sequence[Recorded], tenant: str, rng: Random) -> Spent:
    """A workload in an order of chance, as often as it takes, each time of another tenant."""
    times = -(-FULL_REQUESTS // len(requests))
    passes = [rng.sample(requests, len(requests)) for _ in range(times)]
    return engine.full((one, f"{tenant} {n}") for n, asked in enumerate(passes) for one in asked)


MODES = {"job": in_jobs, "full": in_full}
Key = tuple[str, str, str, str]  # machine, method, workload, mode


def decode(
    setting: tuple[str, str, str],
    unrest: Unrest,
    order: Order,
    seed: int,
    texts: Mapping[str, Sequence[Recorded]],
) -> Iterator[tuple[str, Spent]]:
    """What one engine takes for an order of workloads on a machine, with a method, in a mode."""
    machine, method, mode = setting
    rng = Random(f"{SEED} {seed} {setting} {order}")
    engine = Engine(method, Machine(machine, unrest, rng))
    engine.job([replace(one, answer=one.answer[:WARM_UP_TOKENS]) for one in texts["open"]], "")
    for position, name in enumerate((*order.before, *order.then)):
        spent = MODES[mode](engine, texts[name], f"{name} {position}", rng)
        if position >= len(order.before):
            yield name, spent


def measure(
    options: argparse.Namespace, texts: Mapping[str, Sequence[Recorded]]
) -> dict[Key, list[Spent]]:
    """Every run of everything."""
    runs: dict[Key, list[Spent]] = defaultdict(list)
    unrest = Unrest(options.jumps, options.contention)
    for machine, method, mode in product(options.machines, options.methods, MODES):
        for order, seed in product(orders(list(texts)), range(options.seeds)):
            for name, spent in decode((machine, method, mode), unrest, order, seed, texts):
                runs[machine, method, name, mode].append(spent)
    return runs


def row(key: Key, runs: Sequence[Spent]) -> dict[str, Any]:
    """What is told of a workload's runs."""
    ratios = sorted(run.ratio for run in runs)
    num_steps, num_drafts = (sum(getattr(r, n) for r in runs) for n in ("num_steps", "num_drafts"))
    return {
        **dict(zip(("machine", "method", "workload", "mode"), key, strict=True)),
        "num_runs": len(runs),
        "mean": statistics.fmean(ratios),
        "percentile_5": ratios[len(ratios) // 20],
        "min": ratios[0],
        "drafts_per_step": num_drafts / num_steps,
        "gained_per_draft": sum(run.num_gained for run in runs) / max(num_drafts, 1),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table: the modes of a workload side by side."""
    print(f"{'':37}" + "".join(f"{mode:>13}{'5 %':>7}{'min':>7}{'drafts':>8}" for mode in MODES))
    lines: dict[tuple[str, ...], str] = defaultdict(str)
    for one in rows:
        lines[one["machine"], one["method"], one["workload"]] += (
            f"{one['mean']:13.3f}{one['percentile_5']:7.3f}{one['min']:7.3f}"
            f"{one['drafts_per_step']:8.1f}"
        )
    for (machine, method, name), line in lines.items():
        print(f"{machine:7}{method:8}{name:22}{line}")


def main() -> None:
    """Decode, print the table and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--methods", nargs="+", choices=HOST_METHODS, default=list(HOST_METHODS))
    parser.add_argument("--jumps", type=float, default=0.15, help="spread of log speeds; 0: none")
    parser.add_argument("--contention", type=float, default=0.7, help="see `Unrest`; 0: none")
    parser.add_argument("--record", action="store_true", help="have the model answer anew")
    parser.add_argument("--json", type=Path, default=RESULTS / "speculation_virtual.json")
    options = parser.parse_args()
    runs = measure(options, recorded(options.model, options.record))
    rows = [row(key, spent) for key, spent in runs.items()]
    print_rows(rows)
    ratios = [run.ratio for each in runs.values() for run in each]
    bad = sum(ratio < BAD for ratio in ratios) / len(ratios)
    print(f"{bad:.1%} of {len(ratios)} runs are below {BAD}")
    used = {
        "seed": SEED,
        "seeds": options.seeds,
        "jumps": options.jumps,
        "contention": options.contention,
    }
    document = {**used, f"below_{BAD}": bad, "rows": rows}
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
