"""The settings of a training run, and the flags of `pointsman train-draft` that give them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import ConfigError
from worker.flag_types import at_least, positive

EPOCHS = 5
# The largest part of `minutes` that goes into writing text.
WRITING_SHARE = 0.5
# Acceptance is reported for drafts of this many tokens.
MEASURED_DRAFT = 4
_DESCRIPTION = """\
Train a draft head for a model: one small layer that predicts the next tokens, so that the worker
verifies several in one step. It learns from text that the model writes itself, and from the given
text files. An interrupted run resumes when it is started again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`pointsman train-draft`, resolved.

    `tokens` are those that the model writes itself; `text` is read besides. `steps` None: as many
    as give `EPOCHS` rounds over the data. `minutes` None: no limit; else the run ends after about
    so many, with what it has learned by then. `out` None: the place where a worker looks for a head
    of this model. `start_from` is a head to go on with; its MLP keeps its size, the draft
    vocabulary is chosen anew. `overwrite`: any head in `out` is replaced, also a better one.
    `dtype` "auto": what writes text fastest.
    """

    model: Path
    text: tuple[Path, ...] = ()
    tokens: int = 200_000
    steps: int | None = None
    out: Path | None = None
    seed: int = 0
    start_from: Path | None = None
    overwrite: bool = False
    minutes: float | None = None
    num_threads: int | None = None
    num_rows: int = 64
    batch_tokens: int = 2048
    learning_rate: float = 0.006
    passes: int = 2
    draft_vocab_size: int = 4096
    intermediate_size: int = 1024
    dtype: str = "auto"


def _seed(text: str) -> int:
    """What random numbers are drawn from: 63 bits."""
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2^63 - 1, got {value}")
    return value


_Rows = tuple[tuple[str, Any, str | None, str | None], ...]
# Flag, type of its value, its name in the help, the help. Each sets the field of its own name.
_FLAGS: _Rows = (
    (
        "--model",
        Path,
        "PATH",
        "GGUF file or Hugging Face directory; the `pointsman` command also takes a name, and"
        " without any the default model",
    ),
    ("--text", Path, "FILE", "learn from this text too; may be given several times"),
    (
        "--tokens",
        at_least(0),
        "N",
        "how many tokens the model writes to learn from (default %(default)s)",
    ),
    ("--steps", at_least(1), "N", "training steps (default: five rounds over the data)"),
    (
        "--out",
        Path,
        "DIR",
        "where to put the head, its card and what is under way"
        " (default: ~/.cache/pointsman/heads/FINGERPRINT, where the worker looks)",
    ),
    (
        "--start-from",
        Path,
        "HEAD",
        "go on with this head's weights instead of new ones",
    ),
    ("--seed", _seed, "N", None),
    (
        "--minutes",
        positive,
        "M",
        "end after about so long: half of it at most for gathering text, the rest to learn",
    ),
)
_TUNING: _Rows = (
    ("--num-threads", at_least(1), "N", "of torch"),
    ("--num-rows", at_least(1), "N", "conversations written side by side (default %(default)s)"),
    ("--batch-tokens", at_least(16), "N", "tokens of a training step (default %(default)s)"),
    ("--learning-rate", positive, "RATE", "the highest (default %(default)s)"),
    ("--passes", at_least(1), "N", "drafts in a row that it is trained for (default %(default)s)"),
    ("--draft-vocab-size", at_least(1), "N", "tokens that it can say (default %(default)s)"),
    ("--intermediate-size", at_least(1), "N", "width of its MLP (default %(default)s)"),
)


def build_parser() -> argparse.ArgumentParser:
    """Every flag, with the defaults of `Settings`."""
    parser = argparse.ArgumentParser(
        prog="pointsman train-draft", description=_DESCRIPTION, allow_abbrev=False
    )
    tuning = parser.add_argument_group("tuning")
    for group, rows in ((parser, _FLAGS), (tuning, _TUNING)):
        for flag, kind, metavar, text in rows:
            action = "append" if flag == "--text" else "store"
            group.add_argument(flag, type=kind, metavar=metavar, help=text, action=action)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a head that is there already, even by one that foresees less, or of another"
        " model",
    )
    tuning.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of the model while it writes (default: the fastest here)",
    )
    defaults = Settings(model=Path())
    parser.set_defaults(
        **{name: getattr(defaults, name) for name in Settings.__slots__ if name != "model"}
    )
    parser.set_defaults(text=[])
    return parser


def resolve(argv: Sequence[str] | None) -> Settings:
    """The settings that flags ask for. `ConfigError` names what cannot work and what helps."""
    options = build_parser().parse_args(argv)
    if options.model is None:
        raise ConfigError("--model is missing: which model is the head for?")
    if options.tokens == 0 and not options.text:
        raise ConfigError("--tokens 0 leaves nothing to learn from; give --text, or tokens")
    for path in options.text:
        if not path.is_file():
            raise ConfigError(f"--text {path}: no such file")
    return Settings(**vars(options) | {"text": tuple(options.text)})
