"""The settings of a training run, and the flags of `pointsman train-draft` that give them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from base.flags import Dialect, Parser, add_flags, defaults_of
from worker.errors import ConfigError

EPOCHS = 5
# The largest part of `minutes` that is spent on writing text.
WRITING_SHARE = 0.5
# Acceptance is reported for drafts of this many tokens.
MEASURED_DRAFT = 4
_DESCRIPTION = """\
Train a draft head for a model: one small layer that predicts the next tokens, so that the worker
verifies several in one step. It learns from text that the model writes itself, and from the given
text files. An interrupted run resumes when it is started again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run; defaults are those of the flags.

    `tokens` is the number that the model writes itself, in addition to `text`. `steps` None:
    `EPOCHS` rounds over the data. `minutes` limits the run, which then saves the head as it is;
    None: no limit. `out` None: the folder in which a worker finds a head of this model.
    `start_from` is a head to train further; the size of its MLP stays, but the draft vocabulary is
    chosen anew. `overwrite`: replace any head in `out`, even a better one. `dtype` "auto": the
    fastest for writing text.
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


_FLAGS: Final = """
--model PATH                  GGUF file or Hugging Face directory; the `pointsman` command also
                              takes a name, and without any the default model
--text FILE                   learn from this text too; may be given several times
--tokens N[0..]               number of tokens that the model writes to learn from
--steps N[1..]                training steps (default: five rounds over the data)
--out DIR                     folder of the head, its card and unfinished work (default:
                              ~/.cache/pointsman/heads/FINGERPRINT, where the worker looks)
--start-from HEAD             start with the weights of this head instead of new ones
--seed SEED                   seed of all random numbers
--minutes M(0..]              time after which the run ends: half of it at most for writing text,
                              the rest for training
--overwrite                   replace an existing head, even by one that predicts less, or of
                              another model

tuning
--num-threads N[1..]          threads of torch
--num-rows N[1..]             conversations written side by side
--batch-tokens N[16..]        tokens of a training step
--learning-rate RATE(0..]     highest learning rate
--passes N[1..]               drafts in a row for which the head is trained
--draft-vocab-size N[1..]     tokens that the head can predict
--intermediate-size N[1..]    width of the head's MLP
--dtype auto|float32|bfloat16
                              type of the model while it writes text (default: the fastest here)
"""


def _seed(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 1 << 63:
        raise ValueError(f"must be from 0 to 2^63 - 1, got {text}")
    return value


def build_parser() -> Parser:
    parser = Parser(prog="pointsman train-draft", description=_DESCRIPTION)
    dialect = Dialect(
        readers={**dict.fromkeys(("PATH", "FILE", "DIR", "HEAD"), Path), "SEED": _seed},
        defaults=defaults_of(Settings),
        settings={"--text": {"action": "append", "default": []}},
    )
    add_flags(parser, _FLAGS, dialect)
    return parser


def resolve(argv: Sequence[str] | None) -> Settings:
    """Return the settings that flags ask for. `ConfigError` names the problem and a remedy."""
    options = build_parser().parse_args(argv)
    if options.model is None:
        raise ConfigError("--model is missing: which model is the head for?")
    if options.tokens == 0 and not options.text:
        raise ConfigError("--tokens 0 leaves nothing to learn from; give --text, or tokens")
    for path in options.text:
        if not path.is_file():
            raise ConfigError(f"--text {path}: no such file")
    return Settings(**vars(options) | {"text": tuple(options.text)})
