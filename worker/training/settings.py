"""What a training run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """`pointsman train-draft`, resolved.

    `num_tokens` are those that the model says itself; `texts` are read besides. `steps` None: as
    many as give `EPOCHS` rounds over the data. `minutes` None: however long it takes; else the
    run ends after about so many, with what it has learned by then. `out` None: the place where a
    worker looks for a head of this model. `start_from` is a head to go on with; its MLP keeps
    its size, the draft vocabulary is chosen anew. `overwrite`: whatever head is in `out` already is
    replaced, also a better one. `dtype` "auto": what writes text fastest.
    """

    model: Path
    texts: tuple[Path, ...] = ()
    num_tokens: int = 200_000
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


EPOCHS = 5
# Of `minutes`, how much goes into writing text at most.
WRITING_SHARE = 0.5
# A draft of so many tokens is what acceptance is told of.
MEASURED_DRAFT = 4
