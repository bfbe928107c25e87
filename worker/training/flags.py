"""The flags of `pointsman train-draft`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from worker.errors import ConfigError
from worker.flag_types import at_least, positive
from worker.training.settings import Settings

_DEFAULTS = Settings(model=Path())
_DESCRIPTION = """\
Train a draft head for a model: one small layer that foresees what the model says next, so that the
worker can check several tokens in one step. It learns from text that the model writes itself, and
from any text files given. A run that is stopped goes on where it was when it is started again."""


def build_parser() -> argparse.ArgumentParser:
    """Every flag."""
    parser = argparse.ArgumentParser(
        prog="pointsman train-draft", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file or Hugging Face directory; the `pointsman` command also takes a name, and"
        " without any the default model",
    )
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="learn from this text too; may be given several times",
    )
    parser.add_argument(
        "--tokens",
        type=at_least(0),
        default=_DEFAULTS.num_tokens,
        metavar="N",
        help="how many tokens the model writes to learn from (default %(default)s)",
    )
    _add_run(parser)
    _add_tuning(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help="training steps (default: five rounds over the data)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to put the head, its card and what is under way"
        " (default: ~/.cache/pointsman/heads/FINGERPRINT, where the worker looks)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a head that is there already, even by one that foresees less, or of another"
        " model",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="HEAD",
        help="go on with this head's weights instead of new ones",
    )
    parser.add_argument("--seed", type=_seed, default=_DEFAULTS.seed, metavar="N")
    parser.add_argument(
        "--minutes",
        type=positive,
        metavar="M",
        help="end after about so long: half of it at most for gathering text, the rest to learn",
    )


def _seed(text: str) -> int:
    """What random numbers are drawn from: 63 bits."""
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2^63 - 1, got {value}")
    return value


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tuning")
    group.add_argument("--num-threads", type=at_least(1), metavar="N", help="of torch")
    group.add_argument(
        "--num-rows",
        type=at_least(1),
        default=_DEFAULTS.num_rows,
        metavar="N",
        help="conversations written side by side (default %(default)s)",
    )
    group.add_argument(
        "--batch-tokens",
        type=at_least(16),
        default=_DEFAULTS.batch_tokens,
        metavar="N",
        help="tokens of a training step (default %(default)s)",
    )
    group.add_argument(
        "--learning-rate",
        type=positive,
        default=_DEFAULTS.learning_rate,
        metavar="RATE",
        help="the highest (default %(default)s)",
    )
    _add_shape(group)


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--passes",
        type=at_least(1),
        default=_DEFAULTS.passes,
        metavar="N",
        help="drafts in a row that it is trained for (default %(default)s)",
    )
    group.add_argument(
        "--draft-vocab-size",
        type=at_least(1),
        default=_DEFAULTS.draft_vocab_size,
        metavar="N",
        help="tokens that it can say (default %(default)s)",
    )
    group.add_argument(
        "--intermediate-size",
        type=at_least(1),
        default=_DEFAULTS.intermediate_size,
        metavar="N",
        help="width of its MLP (default %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default=_DEFAULTS.dtype,
        help="of the model while it writes (default: the fastest here)",
    )


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
    return Settings(
        model=options.model,
        texts=tuple(options.text),
        num_tokens=options.tokens,
        steps=options.steps,
        out=options.out,
        seed=options.seed,
        start_from=options.start_from,
        overwrite=options.overwrite,
        minutes=options.minutes,
        num_threads=options.num_threads,
        num_rows=options.num_rows,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        passes=options.passes,
        draft_vocab_size=options.draft_vocab_size,
        intermediate_size=options.intermediate_size,
        dtype=options.dtype,
    )
