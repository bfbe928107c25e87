"""A training run from end to end: write text, read texts, train, measure, write the head.

Everything lies under `Settings.out` as soon as it is there, under names made of what it depends on:
a run that was killed goes on where it was, and one that is asked for something else does not mix it
with what it finds.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from worker.errors import ConfigError, ModelError
from worker.models.draft_head import (
    HEAD_FILE,
    HeadShape,
    fingerprint,
    heads_directory,
    read_head,
)
from worker.models.loader import load_model
from worker.ops.linear import can_pack, fast_dtype, supported_dtype
from worker.tokenizer.chat import chat_template_of
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer
from worker.training.card import CARD_FILE, Effort, Result, Source, rounded, write_card, write_head
from worker.training.conversations import (
    LONGEST_CONVERSATION,
    Conversation,
    Interviewer,
    chat_frame,
)
from worker.training.dataset import batches, divide
from worker.training.generate import Scribe
from worker.training.initial import fit_linear
from worker.training.lockstep import LockstepDecoder
from worker.training.objective import Acceptance, Objective, local_ids, measure
from worker.training.progress import ProgressLine
from worker.training.settings import EPOCHS, MEASURED_DRAFT, WRITING_SHARE, Settings
from worker.training.store import Sample, read_samples, shard_path
from worker.training.trainer import Progress, Schedule, Trainer
from worker.training.twin import HeadTwin, teacher_of
from worker.training.vocabulary import choose_draft_vocab
from worker.training.workplace import WORK, occupied, probe

_TEXT_TOKENS = 256
_MAX_POSITIONS = 4096
# Where a head lies that is not as good as the one that was there.
_WORSE = "worse"

# What a head's file holds.
Stored = tuple[HeadShape, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Material:
    """What there is to learn from."""

    own: list[Sample]
    texts: dict[str, list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        """All of it."""
        return [*self.own, *(sample for text in self.texts.values() for sample in text)]


class TrainingRun:
    """One run; owns its models and its directory. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        settings: Settings,
        progress: ProgressLine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model. Raises `ModelError` and `ConfigError` with a message for the user."""
        self._settings = settings
        self._progress = progress
        self._clock = clock
        self._began = clock()
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = _dtype(settings.dtype, self._device)
        self._checkpoint = read_checkpoint(settings.model)
        probe(settings.out or heads_directory())
        positions = min(_MAX_POSITIONS, self._checkpoint.context_length)
        self._longest = min(LONGEST_CONVERSATION, positions)
        self._target = load_model(settings.model, self._dtype, self._device, positions)
        self._interviewer = self._make_interviewer()
        self._fingerprint = fingerprint(self._target)
        self.directory = settings.out or heads_directory() / self._fingerprint
        self._work = self.directory / WORK
        given = settings.start_from
        self._start = None if given is None else read_head(given, self._target)

    def run(self) -> Acceptance:
        """Do all that is not done yet; returns how often the head's drafts hold.

        Raises `ConfigError` for a directory that cannot be used, or is used by another run.
        """
        with occupied(self.directory):
            return self._run(self._former())

    def _run(self, former: Stored | None) -> Acceptance:
        settings = self._settings
        material = self._gather()
        learned, held_out = divide(material.samples)
        twin, draft_vocab = self._new_head(learned)
        steps = self._train(twin, learned, draft_vocab)
        acceptance = self._measure(twin, held_out, draft_vocab)
        source = Source(
            conversations=len(material.own),
            own_tokens=_num_targets(material.own),
            texts={name: _num_targets(samples) for name, samples in material.texts.items()},
            held_out=len(held_out),
        )
        effort = Effort(steps, settings.batch_tokens, settings.passes, settings.seed, self._spent())
        result = Result(self._fingerprint, source, effort, acceptance)
        is_worse = former is not None and self._is_worse(acceptance, former, held_out)
        self._write(self._work / _WORSE if is_worse else self.directory, twin, draft_vocab, result)
        return acceptance

    # ---- writing and reading ----------------------------------------------------------------

    def _gather(self) -> Material:
        settings = self._settings
        paths = tuple(dict.fromkeys(settings.texts))
        left = len(paths) + (settings.num_tokens > 0)
        texts: dict[str, list[Sample]] = {}
        for path in paths:
            texts[str(path)] = self._read(path, self._until(left))
            left -= 1
        own = self._own_text(self._until(left)) if settings.num_tokens else []
        return Material(own, texts)

    def _until(self, num_left: int) -> float | None:
        """When, in seconds spent, the next of `num_left` sources has to be done: each may take an
        even part of what is left of the time for them all. None: whenever.
        """
        if self._settings.minutes is None:
            return None
        now, end = self._spent(), self._settings.minutes * 60 * WRITING_SHARE
        return now + max(0.0, end - now) / num_left

    def _own_text(self, until: float | None) -> list[Sample]:
        """What the target says, and its thoughts on it."""
        seed = self._settings.seed

        def opened(index: int) -> Conversation:
            return self._interviewer.conversation(random.Random(f"{seed}/{index}"))

        self._progress.begin("writing text")
        directory = self._work / f"own-{seed}-{self._mark}"
        num_tokens, prefix = self._settings.num_tokens, self._interviewer.prefix
        return self._written(directory, opened, num_tokens, prefix, until)

    def _read(self, path: Path, until: float | None) -> list[Sample]:
        """The target's thoughts on a text file."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--text {path}: {error.strerror}") from error
        text = content.decode("utf-8", errors="replace")
        tokens = self._interviewer.tokenizer.encode(text, add_special_tokens=False)
        size = min(_TEXT_TOKENS, self._longest - len(self._interviewer.bos_token_ids))
        windows = [tokens[i : i + size] for i in range(0, len(tokens), size)]

        def opened(index: int) -> Conversation | None:
            return self._interviewer.text(windows[index]) if index < len(windows) else None

        self._progress.begin(f"reading {path.name}")
        name = hashlib.sha256(content).hexdigest()[:16]
        directory = self._work / f"text-{name}-{self._mark}"
        return self._written(directory, opened, len(tokens), (), until)

    @property
    def _mark(self) -> str:
        """Names what all that is written depends on besides the seed, or the text that is read."""
        of = (self._fingerprint, self._dtype, self._longest, self._checkpoint.chat_template)
        return hashlib.sha256(repr(of).encode()).hexdigest()[:12]

    def _written(
        self,
        directory: Path,
        opened: Callable[[int], Conversation | None],
        num_tokens: int,
        prefix: Sequence[int],
        until: float | None,
    ) -> list[Sample]:
        """Have conversations that begin with `prefix` written, or those there are read."""
        scribe = Scribe(
            self._target,
            LockstepDecoder(self._target, self._settings.num_rows, self._longest),
            opened,
            self._checkpoint.eos_token_ids,
            prefix,
        )

        def told(count: int) -> bool:
            self._progress.tell(count, num_tokens, f"{count:,} of {num_tokens:,} tokens")
            return until is None or self._spent() < until

        with torch.inference_mode():
            shards = scribe.write(directory, num_tokens, self._settings.seed, told)
        self._progress.end()
        return [sample for n in shards for sample in read_samples(shard_path(directory, n))]

    def _make_interviewer(self) -> Interviewer:
        checkpoint = self._checkpoint
        tokenizer = build_tokenizer(checkpoint)
        template = chat_template_of(checkpoint, now=datetime.now)
        has_bos = checkpoint.bos_token_id is not None and template is None
        return Interviewer(
            tokenizer,
            None if template is None else chat_frame(tokenizer, template),
            (checkpoint.bos_token_id,) if has_bos and checkpoint.bos_token_id is not None else (),
            checkpoint.eos_token_ids,
        )

    # ---- learning ---------------------------------------------------------------------------

    def _new_head(self, learned: Sequence[Sample]) -> tuple[HeadTwin, Tensor]:
        """The head to train, as it begins, and its draft vocabulary."""
        settings, target = self._settings, self._target
        vocab_size, ends = target.config.vocab_size, self._checkpoint.eos_token_ids
        chosen = choose_draft_vocab(learned, vocab_size, settings.draft_vocab_size, ends)
        draft_vocab = chosen.to(self._device)
        noise = torch.Generator().manual_seed(settings.seed)
        if self._start is not None:
            return self._twin_of(self._start, draft_vocab), draft_vocab
        shape = HeadShape(settings.intermediate_size, len(draft_vocab))
        twin = HeadTwin(shape, teacher_of(target, draft_vocab), noise)
        every = batches(learned, settings.batch_tokens, None)
        fit_linear(twin, (b.to(self._device) for b in every if b is not None))
        return twin, draft_vocab

    def _twin_of(self, stored: Stored, draft_vocab: Tensor) -> HeadTwin:
        """A head from its file, to be trained or measured with a draft vocabulary."""
        given, tensors = stored
        shape = HeadShape(given.intermediate_size, len(draft_vocab))
        twin = HeadTwin(shape, teacher_of(self._target, draft_vocab), torch.Generator())
        twin.load_state_dict({name: tensors[name].float() for name in twin.weights()})
        return twin

    def _train(self, twin: HeadTwin, learned: Sequence[Sample], draft_vocab: Tensor) -> int:
        """Learn until the schedule's end, or for as long as there is time; the steps done."""
        settings = self._settings
        began = self._spent()
        if settings.minutes is not None and began >= settings.minutes * 60:
            raise ConfigError(
                f"--minutes {settings.minutes:g} were over before training began; give more, or"
                " start again: the text that there is now is kept"
            )
        per_epoch = sum(1 for _ in batches(learned, settings.batch_tokens, None, len(learned)))
        steps = settings.steps or EPOCHS * per_epoch
        schedule = Schedule(
            steps, settings.batch_tokens, settings.learning_rate, seed=settings.seed
        )
        objective = Objective(
            settings.passes, local_ids(draft_vocab, self._target.config.vocab_size)
        )
        name = self._identity(learned, schedule)
        trainer = Trainer(twin, objective, schedule, self._work / f"checkpoint-{name}.safetensors")
        trainer.resume()
        self._progress.begin("training", trainer.step)

        def told(state: Progress) -> float:
            used = 0.0
            if settings.minutes is not None:
                used = (self._spent() - began) / max(1e-9, settings.minutes * 60 - began)
            note = f"step {state.step}, loss {state.loss:.3f}"
            self._progress.tell(max(state.step, used * state.steps), state.steps, note)
            return used

        trainer.run(learned, self._autocast, told)
        self._progress.end()
        return trainer.step

    @property
    def _autocast(self) -> bool:
        return self._dtype is torch.bfloat16

    def _identity(self, learned: Sequence[Sample], schedule: Schedule) -> str:
        """Names all that the course of a training depends on."""
        settings = self._settings
        digest = hashlib.sha256(repr(schedule).encode())
        sizes = (settings.passes, settings.draft_vocab_size, settings.intermediate_size)
        digest.update(f"{self._fingerprint} {self._dtype} {sizes}".encode())
        if settings.start_from is not None:
            digest.update(settings.start_from.read_bytes())
        for sample in learned:
            digest.update(sample.token_ids.numpy().tobytes())
        return digest.hexdigest()[:16]

    # ---- the result -------------------------------------------------------------------------

    def _measure(
        self, twin: HeadTwin, held_out: Sequence[Sample], draft_vocab: Tensor
    ) -> Acceptance:
        """How often drafts of the head hold, in the precision that its file has."""
        with torch.no_grad():
            for name, tensor in rounded(twin.weights()).items():
                twin.get_parameter(name).copy_(tensor)
        every = torch.arange(self._target.config.vocab_size, device=self._device)
        lm_head = self._target.head.rows(every)
        self._progress.say(f"measuring with {len(held_out)} conversations that it has not seen")
        parts = batches(held_out, self._settings.batch_tokens, None)
        shown = (b.to(self._device) for b in parts if b is not None)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            return measure(twin, lm_head, draft_vocab, shown, MEASURED_DRAFT)

    def _former(self) -> Stored | None:
        """The head that is there already, unless it may be replaced whatever it is."""
        path = self.directory / HEAD_FILE
        if self._settings.overwrite or not path.exists():
            return None
        try:
            return read_head(path, self._target)
        except ModelError as error:
            raise ConfigError(
                f"--out {self.directory}: {HEAD_FILE} there is not for this model; give another"
                " --out, or --overwrite to replace it"
            ) from error

    def _is_worse(self, new: Acceptance, former: Stored, held_out: Sequence[Sample]) -> bool:
        """Whether the head that is there already foresees more of the same texts; says so."""
        draft_vocab = former[1]["draft_vocab"].to(self._device)
        old = self._measure(self._twin_of(former, draft_vocab), held_out, draft_vocab)
        there, here = (found.expected_tokens(MEASURED_DRAFT) for found in (old, new))
        if here >= there and new.starts:
            return False
        self._progress.say(
            f"the head in {self.directory} stays: with {MEASURED_DRAFT} drafts a step it gives"
            f" {there:.2f} tokens a step, the new one {here:.2f}; --overwrite replaces it"
        )
        return True

    def _write(self, directory: Path, twin: HeadTwin, draft_vocab: Tensor, result: Result) -> None:
        """Write the head and its card."""
        path = directory / HEAD_FILE
        write_head(path, rounded(twin.weights()), draft_vocab, twin.shape, self._target)
        write_card(directory / CARD_FILE, self._checkpoint.name, twin.shape, result)
        self._progress.say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")

    def _spent(self) -> float:
        return self._clock() - self._began


def _num_targets(samples: Sequence[Sample]) -> int:
    return sum(int(sample.is_target.sum()) for sample in samples)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return fast_dtype(device)
    asked = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return supported_dtype(asked, device, can_pack(torch.bfloat16))
