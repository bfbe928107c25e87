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

from worker.errors import ConfigError
from worker.models.draft_head import (
    HEAD_FILE,
    HeadShape,
    fingerprint,
    heads_directory,
    read_head,
)
from worker.models.loader import load_model
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

_TEXT_TOKENS = 256
_MAX_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Material:
    """What there is to learn from."""

    own: list[Sample]
    texts: dict[str, list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        """All of it."""
        return [*self.own, *(sample for text in self.texts.values() for sample in text)]


def fast_dtype(device: torch.device) -> torch.dtype:
    """What products run fastest in: bfloat16 where the device multiplies it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


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
        positions = min(_MAX_POSITIONS, self._checkpoint.context_length)
        self._target = load_model(settings.model, self._dtype, self._device, positions)
        self._interviewer = self._make_interviewer()
        self._fingerprint = fingerprint(self._target)
        self.directory = settings.out or heads_directory() / self._fingerprint
        self._work = self.directory / "training"

    def run(self) -> Acceptance:
        """Do all that is not done yet; returns how often the head's drafts hold."""
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
        self._write(twin, draft_vocab, result)
        return acceptance

    # ---- writing and reading ----------------------------------------------------------------

    def _gather(self) -> Material:
        settings = self._settings
        own: list[Sample] = []
        if settings.num_tokens:
            self._progress.begin("writing text")

            def opened(index: int) -> Conversation:
                rng = random.Random(f"{settings.seed}/{index}")
                return self._interviewer.conversation(rng)

            directory = self._work / f"own-{settings.seed}"
            own = self._written(directory, opened, settings.num_tokens, self._interviewer.prefix)
        texts = {path.name: self._read(path) for path in settings.texts}
        return Material(own, texts)

    def _read(self, path: Path) -> list[Sample]:
        """The target's thoughts on a text file."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--text {path}: {error.strerror}") from error
        text = content.decode("utf-8", errors="replace")
        tokens = self._interviewer.tokenizer.encode(text, add_special_tokens=False)
        windows = [tokens[i : i + _TEXT_TOKENS] for i in range(0, len(tokens), _TEXT_TOKENS)]

        def opened(index: int) -> Conversation | None:
            return self._interviewer.text(windows[index]) if index < len(windows) else None

        self._progress.begin(f"reading {path.name}")
        name = hashlib.sha256(content).hexdigest()[:16]
        return self._written(self._work / f"text-{name}", opened, len(tokens), ())

    def _written(
        self,
        directory: Path,
        opened: Callable[[int], Conversation | None],
        num_tokens: int,
        prefix: Sequence[int],
    ) -> list[Sample]:
        """Have conversations that begin with `prefix` written, or those there are read."""
        scribe = Scribe(
            self._target,
            LockstepDecoder(self._target, self._settings.num_rows, LONGEST_CONVERSATION),
            opened,
            self._checkpoint.eos_token_ids,
            prefix,
        )
        began = self._clock()
        limit = None
        if self._settings.minutes is not None:
            limit = self._settings.minutes * 60 * WRITING_SHARE

        def told(count: int) -> bool:
            self._progress.tell(count, num_tokens, f"{count:,} of {num_tokens:,} tokens")
            return limit is None or self._clock() - began < limit

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
        if settings.start_from is not None:
            given, tensors = read_head(settings.start_from, target)
            shape = HeadShape(given.intermediate_size, len(draft_vocab))
            twin = HeadTwin(shape, teacher_of(target, draft_vocab), noise)
            twin.load_state_dict({name: tensors[name].float() for name in twin.weights()})
            return twin, draft_vocab
        shape = HeadShape(settings.intermediate_size, len(draft_vocab))
        twin = HeadTwin(shape, teacher_of(target, draft_vocab), noise)
        every = batches(learned, settings.batch_tokens, None)
        fit_linear(twin, (b.to(self._device) for b in every if b is not None))
        return twin, draft_vocab

    def _train(self, twin: HeadTwin, learned: Sequence[Sample], draft_vocab: Tensor) -> int:
        """Learn until the schedule's end, or for as long as there is time; the steps done."""
        settings = self._settings
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

        began = self._spent()

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

    def _write(self, twin: HeadTwin, draft_vocab: Tensor, result: Result) -> None:
        """Write the head and its card."""
        path = self.directory / HEAD_FILE
        write_head(path, rounded(twin.weights()), draft_vocab, twin.shape, self._target)
        write_card(self.directory / CARD_FILE, self._checkpoint.name, twin.shape, result)
        self._progress.say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")

    def _spent(self) -> float:
        return self._clock() - self._began


def _num_targets(samples: Sequence[Sample]) -> int:
    return sum(int(sample.is_target.sum()) for sample in samples)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return fast_dtype(device)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
