"""A training run from end to end: write text, read texts, train, measure, write the head.

Each result is saved below `Settings.out` at once, under a name derived from its inputs: a killed
run resumes, and a run with other settings does not mix its files with these.
"""

import hashlib
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.errors import ConfigError, ModelError
from worker.models.draft_head import HEAD_FILE, HeadShape, fingerprint, heads_directory, read_head
from worker.models.loader import load_model
from worker.ops.linear import can_pack, fast_dtype, supported_dtype
from worker.tokenizer.chat import chat_template_of
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer
from worker.training.conversations import (
    LONGEST_CONVERSATION,
    Conversation,
    ConversationMaker,
    chat_frame,
)
from worker.training.dataset import batches, choose_draft_vocab, divide
from worker.training.flags import EPOCHS, MEASURED_DRAFT, WRITING_SHARE, Settings
from worker.training.objective import DraftAcceptance, HeadObjective, local_ids, measure
from worker.training.progress import ProgressLine
from worker.training.store import (
    WORK,
    TrainingSample,
    check_writable,
    head_metadata,
    locked,
    num_targets,
    read_samples,
    shard_path,
    write_tensors,
)
from worker.training.trainer import Schedule, StepReport, Trainer
from worker.training.twin import HeadTwin, fit_linear, teacher_of
from worker.training.writing import TextWriter

CARD_FILE = "card.json"
_TEXT_TOKENS = 256
_MAX_POSITIONS = 4096
# The folder of a head that is worse than the existing one.
_WORSE = "worse"

# The contents of a head's file.
Stored = tuple[HeadShape, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Material:
    """The samples to learn from: the model's own, and those of texts by file."""

    own: list[TrainingSample]
    texts: dict[str, list[TrainingSample]]

    @property
    def samples(self) -> list[TrainingSample]:
        return [*self.own, *(sample for text in self.texts.values() for sample in text)]


class TrainingRun:
    """One run; owns its models and its directory. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        settings: Settings,
        progress: ProgressLine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._clock = clock
        self._began = clock()
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = _dtype(settings.dtype, self._device)
        self._checkpoint = read_checkpoint(settings.model)
        check_writable(settings.out or heads_directory())
        positions = min(_MAX_POSITIONS, self._checkpoint.context_length)
        self._longest = min(LONGEST_CONVERSATION, positions)
        self._target = load_model(settings.model, self._dtype, self._device, positions)
        self._conversations = self._make_conversations()
        self._fingerprint = fingerprint(self._target)
        self.directory = settings.out or heads_directory() / self._fingerprint
        self._work = self.directory / WORK
        given = settings.start_from
        self._start = None if given is None else read_head(given, self._target)

    def run(self) -> DraftAcceptance:
        """Return the acceptance of drafts. Raise `ConfigError` for an unusable directory."""
        with locked(self.directory):
            return self._run(self._former())

    def _run(self, former: Stored | None) -> DraftAcceptance:
        settings = self._settings
        material = self._gather()
        learned, held_out = divide(material.samples)
        twin, draft_vocab = self._new_head(learned)
        steps = self._train(twin, learned, draft_vocab)
        acceptance = self._measure(twin, held_out, draft_vocab)
        card = self._card(twin, material, acceptance) | {
            "training": {
                "steps": steps,
                "batch_tokens": settings.batch_tokens,
                "passes": settings.passes,
                "seed": settings.seed,
                "seconds": self._spent(),
            }
        }
        card["data"]["held_out"] = len(held_out)
        is_worse = former is not None and self._is_worse(acceptance, former, held_out)
        self._write(self._work / _WORSE if is_worse else self.directory, twin, draft_vocab, card)
        return acceptance

    # ---- writing and reading ----------------------------------------------------------------

    def _gather(self) -> Material:
        settings = self._settings
        paths = tuple(dict.fromkeys(settings.text))
        left = len(paths) + (settings.tokens > 0)
        texts: dict[str, list[TrainingSample]] = {}
        for path in paths:
            texts[str(path)] = self._read(path, self._until(left))
            left -= 1
        own = self._own_text(self._until(left)) if settings.tokens else []
        return Material(own, texts)

    def _until(self, num_left: int) -> float | None:
        """Return when the next of `num_left` sources must end, in seconds since the start: each has
        an equal part of the time that is left for all. None: there is no limit.
        """
        if self._settings.minutes is None:
            return None
        now, end = self._spent(), self._settings.minutes * 60 * WRITING_SHARE
        return now + max(0.0, end - now) / num_left

    def _own_text(self, until: float | None) -> list[TrainingSample]:
        seed = self._settings.seed

        def opened(index: int) -> Conversation:
            return self._conversations.conversation(random.Random(f"{seed}/{index}"))

        self._progress.begin("writing text")
        directory = self._work / f"own-{seed}-{self._mark}"
        return self._written(directory, opened, self._settings.tokens, until)

    def _read(self, path: Path, until: float | None) -> list[TrainingSample]:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--text {path}: {error.strerror}") from error
        text = content.decode("utf-8", errors="replace")
        tokens = self._conversations.tokenizer.encode(text, add_special_tokens=False)
        size = min(_TEXT_TOKENS, self._longest - len(self._conversations.bos_token_ids))
        windows = [tokens[i : i + size] for i in range(0, len(tokens), size)]

        def opened(index: int) -> Conversation | None:
            return self._conversations.text(windows[index]) if index < len(windows) else None

        self._progress.begin(f"reading {path.name}")
        name = hashlib.sha256(content).hexdigest()[:16]
        directory = self._work / f"text-{name}-{self._mark}"
        return self._written(directory, opened, len(tokens), until)

    @property
    def _mark(self) -> str:
        """A name for the inputs of all samples, except the seed or the text."""
        of = (self._fingerprint, self._dtype, self._longest, self._checkpoint.chat_template)
        return hashlib.sha256(repr(of).encode()).hexdigest()[:12]

    def _written(
        self,
        directory: Path,
        opened: Callable[[int], Conversation | None],
        num_tokens: int,
        until: float | None,
    ) -> list[TrainingSample]:
        """Write conversations, or read those that exist."""

        def report(count: int) -> bool:
            self._progress.update(count, num_tokens, f"{count:,} of {num_tokens:,} tokens")
            return until is None or self._spent() < until

        with torch.inference_mode():
            size = (self._settings.num_rows, self._longest)
            writer = TextWriter(self._target, size, opened, self._checkpoint.eos_token_ids)
            shards = writer.write(directory, num_tokens, self._settings.seed, report)
        self._progress.end()
        return [sample for n in shards for sample in read_samples(shard_path(directory, n))]

    def _make_conversations(self) -> ConversationMaker:
        checkpoint = self._checkpoint
        tokenizer = build_tokenizer(checkpoint)
        template = chat_template_of(checkpoint, now=datetime.now)
        has_bos = checkpoint.bos_token_id is not None and template is None
        return ConversationMaker(
            tokenizer,
            None if template is None else chat_frame(tokenizer, template),
            (checkpoint.bos_token_id,) if has_bos and checkpoint.bos_token_id is not None else (),
            checkpoint.eos_token_ids,
        )

    # ---- learning ---------------------------------------------------------------------------

    def _new_head(self, learned: Sequence[TrainingSample]) -> tuple[HeadTwin, Tensor]:
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
        given, tensors = stored
        shape = HeadShape(given.intermediate_size, len(draft_vocab))
        twin = HeadTwin(shape, teacher_of(self._target, draft_vocab), torch.Generator())
        twin.load_state_dict({name: tensors[name].float() for name in twin.weights()})
        return twin

    def _train(self, twin: HeadTwin, learned: Sequence[TrainingSample], draft_vocab: Tensor) -> int:
        """Train to the end of the schedule or of the time; return the number of steps."""
        settings = self._settings
        began = self._spent()
        if settings.minutes is not None and began >= settings.minutes * 60:
            raise ConfigError(
                f"--minutes {settings.minutes:g} were over before training began; give more, or"
                " start again: the text written so far is reused"
            )
        per_epoch = sum(1 for _ in batches(learned, settings.batch_tokens, None, len(learned)))
        steps = settings.steps or EPOCHS * per_epoch
        schedule = Schedule(
            steps, settings.batch_tokens, settings.learning_rate, seed=settings.seed
        )
        objective = HeadObjective(
            settings.passes, local_ids(draft_vocab, self._target.config.vocab_size)
        )
        name = self._identity(learned, schedule)
        trainer = Trainer(twin, objective, schedule, self._work / f"checkpoint-{name}.safetensors")
        trainer.resume()
        self._progress.begin("training", trainer.step)

        def report(state: StepReport) -> float:
            used = 0.0
            if settings.minutes is not None:
                used = (self._spent() - began) / max(1e-9, settings.minutes * 60 - began)
            note = f"step {state.step}, loss {state.loss:.3f}"
            self._progress.update(max(state.step, used * state.steps), state.steps, note)
            return used

        trainer.run(learned, self._autocast, report)
        self._progress.end()
        return trainer.step

    @property
    def _autocast(self) -> bool:
        return self._dtype is torch.bfloat16

    def _identity(self, learned: Sequence[TrainingSample], schedule: Schedule) -> str:
        """Return a name for everything that a training depends on."""
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
        self, twin: HeadTwin, held_out: Sequence[TrainingSample], draft_vocab: Tensor
    ) -> DraftAcceptance:
        """Measure the drafts of the head, in the precision of its file."""
        with torch.no_grad():
            for name, tensor in _rounded(twin).items():
                twin.get_parameter(name).copy_(tensor)
        every = torch.arange(self._target.config.vocab_size, device=self._device)
        lm_head = self._target.head.rows(every)
        self._progress.say(f"measuring with {len(held_out)} unseen conversations")
        parts = batches(held_out, self._settings.batch_tokens, None)
        shown = (b.to(self._device) for b in parts if b is not None)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            return measure(twin, lm_head, draft_vocab, shown, MEASURED_DRAFT)

    def _former(self) -> Stored | None:
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

    def _is_worse(
        self, new: DraftAcceptance, former: Stored, held_out: Sequence[TrainingSample]
    ) -> bool:
        """Return True if the existing head is better on the same texts, and report it."""
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

    def _card(
        self, twin: HeadTwin, material: Material, acceptance: DraftAcceptance
    ) -> dict[str, Any]:
        texts = {name: num_targets(samples) for name, samples in material.texts.items()}
        lengths = range(1, len(acceptance.held) + 1)
        return {
            "model": self._checkpoint.name,
            "fingerprint": self._fingerprint,
            "shape": asdict(twin.shape),
            "data": {
                "conversations": len(material.own),
                "own_tokens": num_targets(material.own),
                "texts": texts,
            },
            "acceptance": {
                "how": "greedy drafts against the target's greedy answers, held-out conversations;"
                " each position given that all before it held",
                "starts": acceptance.starts,
                "by_position": [round(share, 4) for share in acceptance.conditional],
                "expected_tokens_by_draft_length": {
                    str(n): round(acceptance.expected_tokens(n), 4) for n in lengths
                },
            },
            "made_with": {"torch": torch.__version__, "python": platform.python_version()},
        }

    def _write(
        self, directory: Path, twin: HeadTwin, draft_vocab: Tensor, card: dict[str, Any]
    ) -> None:
        path = directory / HEAD_FILE
        tensors = {**_rounded(twin), "draft_vocab": draft_vocab.to("cpu", torch.int32)}
        write_tensors(path, tensors, head_metadata(twin.shape, self._target))
        partial = directory / f".{CARD_FILE}.partial"  # the directory is locked
        partial.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        partial.replace(directory / CARD_FILE)
        self._progress.say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")

    def _spent(self) -> float:
        return self._clock() - self._began


def _rounded(twin: HeadTwin) -> dict[str, Tensor]:
    """Return the weights in the precision of a file: bfloat16, on the host."""
    return {name: tensor.to("cpu", torch.bfloat16) for name, tensor in twin.weights().items()}


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return fast_dtype(device)
    asked = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return supported_dtype(asked, device, can_pack(torch.bfloat16))
