"""What adaptive draft lengths bring, and what they lose at worst, on machines of known step times.

    python benchmarks/speculation_virtual.py [--seeds 4] [--machines cliff] [--unrest busy]

The production speculation (drafters and adaptive lengths) decodes recorded answers of the default
model, 16 at a time, in virtual time, on machines that are tables (`virtual_machines`), quiet ones
and such as others keep busy. What the speculation is told of a step takes the noise of a shared
machine. Compared are the true times, with drafts and without, so the ratio is exact and the same
wherever this runs. `speculation.py` measures the real engine on a real machine.

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
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from result_files import RESULTS, write_results
from speculation import DEFAULT_MODEL, METHODS, WARM_UP_TOKENS, Texts, workloads
from speculation_runs import Request, Shared, Subject, engine_config
from virtual_machines import MACHINES, UNREST, Machine

from worker.engine.drafters.registry import build_drafter
from worker.engine.lengths.costs import StepCosts
from worker.engine.messages import AddRequest
from worker.engine.planning import Guess
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.speculation import Speculation
from worker.speculation_flags import parse
from worker.types import ModelOutput

SEED = 20261126
ANSWERS = RESULTS / "speculation_answers.json"
HOST_METHODS = ("ngram", "suffix")  # whose drafters need no model
BATCH, MAX_TOKENS = 16, 96
MAX_STEP_TOKENS = 4096
FULL_REQUESTS = 64  # at least so many go through a full engine
BAD = 0.97


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
        write_results(ANSWERS, known)
    answers = {
        request.prompt: Recorded(request, tuple(answer))
        for request, answer in zip(requests, known["answers"], strict=True)
    }
    return {each.name: [answers[one.prompt] for job in each.jobs for one in job] for each in made}


def record(model: Path, texts: Texts, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What the plain engine answers."""
    print(f"recording what {model.name} answers")
    config = engine_config(model, "auto", None, texts.eos_token_ids, None)
    engine = Subject.build("plain", config, Shared())
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
        costs = StepCosts(machine.profile())
        self._speculation = Speculation(config, build_drafter(config), False, costs=costs)
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
Key = tuple[str, str, str, str, str]  # machine, unrest, method, workload, mode


def decode(
    setting: tuple[str, str, str, str],
    order: Order,
    seed: int,
    texts: Mapping[str, Sequence[Recorded]],
) -> Iterator[tuple[str, Spent]]:
    """What one engine takes for an order of workloads, by machine, unrest, method and mode."""
    machine, unrest, method, mode = setting
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
    settings = product(options.machines, options.unrest, options.methods, MODES)
    for setting in settings:
        *engine, mode = setting
        for order, seed in product(orders(list(texts)), range(options.seeds)):
            for name, spent in decode(setting, order, seed, texts):
                runs[*engine, name, mode].append(spent)
    return runs


def row(key: Key, runs: Sequence[Spent]) -> dict[str, Any]:
    """What is told of a workload's runs."""
    ratios = sorted(run.ratio for run in runs)
    num_steps, num_drafts = (sum(getattr(r, n) for r in runs) for n in ("num_steps", "num_drafts"))
    return {
        **dict(zip(("machine", "unrest", "method", "workload", "mode"), key, strict=True)),
        "num_runs": len(runs),
        "mean": statistics.fmean(ratios),
        "percentile_5": ratios[len(ratios) // 20],
        "min": ratios[0],
        "drafts_per_step": num_drafts / num_steps,
        "gained_per_draft": sum(run.num_gained for run in runs) / max(num_drafts, 1),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table: the modes of a workload side by side."""
    print(f"{'':43}" + "".join(f"{mode:>13}{'5 %':>7}{'min':>7}{'drafts':>8}" for mode in MODES))
    lines: dict[tuple[str, ...], str] = defaultdict(str)
    for one in rows:
        lines[one["machine"], one["unrest"], one["method"], one["workload"]] += (
            f"{one['mean']:13.3f}{one['percentile_5']:7.3f}{one['min']:7.3f}"
            f"{one['drafts_per_step']:8.1f}"
        )
    for (machine, unrest, method, name), line in lines.items():
        print(f"{machine:7}{unrest:6}{method:8}{name:22}{line}")


def main() -> None:
    """Decode, print the table and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--methods", nargs="+", choices=HOST_METHODS, default=list(HOST_METHODS))
    parser.add_argument("--unrest", nargs="+", choices=UNREST, default=list(UNREST))
    parser.add_argument("--record", action="store_true", help="have the model answer anew")
    parser.add_argument("--json", type=Path, default=RESULTS / "speculation_virtual.json")
    options = parser.parse_args()
    runs = measure(options, recorded(options.model, options.record))
    rows = [row(key, spent) for key, spent in runs.items()]
    print_rows(rows)
    ratios = [run.ratio for each in runs.values() for run in each]
    bad = sum(ratio < BAD for ratio in ratios) / len(ratios)
    print(f"{bad:.1%} of {len(ratios)} runs are below {BAD}")
    document = {"seed": SEED, "seeds": options.seeds, f"below_{BAD}": bad, "rows": rows}
    write_results(options.json, document)


if __name__ == "__main__":
    main()
