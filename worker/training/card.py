"""What a finished head is written as: its weights, and a card that says where it comes from."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.models.draft_head import HeadShape, head_metadata
from worker.models.llama import LlamaModel
from worker.training.objective import Acceptance
from worker.training.store import write_tensors

CARD_FILE = "card.json"


@dataclass(frozen=True, slots=True)
class Source:
    """What a head learned from: the model's own conversations, texts that were given (by path), and
    tokens worth learning in both. `held_out` conversations were measured with, not learned from.
    """

    conversations: int
    own_tokens: int
    texts: dict[str, int]
    held_out: int


@dataclass(frozen=True, slots=True)
class Effort:
    """What training took: steps of `batch_tokens` padded tokens, passes each, and seconds in all
    (writing text included, whatever runs it was spread over).
    """

    steps: int
    batch_tokens: int
    passes: int
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """All that a card tells of a training besides the head's shape."""

    fingerprint: str
    source: Source
    effort: Effort
    acceptance: Acceptance


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as a file has them: bfloat16, on the host."""
    return {name: tensor.to("cpu", torch.bfloat16) for name, tensor in weights.items()}


def write_head(
    path: Path,
    weights: dict[str, Tensor],
    draft_vocab: Tensor,
    shape: HeadShape,
    target: LlamaModel,
) -> None:
    """Write a head's file: `rounded` weights and the draft vocabulary."""
    tensors = {**weights, "draft_vocab": draft_vocab.to("cpu", torch.int32)}
    write_tensors(path, tensors, head_metadata(shape, target))


def write_card(path: Path, model: str, shape: HeadShape, result: Result) -> None:
    """Write a card to stand next to a head's file."""
    acceptance = result.acceptance
    card: dict[str, Any] = {
        "model": model,
        "fingerprint": result.fingerprint,
        "shape": asdict(shape),
        "data": asdict(result.source),
        "training": asdict(result.effort),
        "acceptance": {
            "how": "greedy drafts against the target's greedy answers, held-out conversations;"
            " each position given that all before it held",
            "starts": acceptance.starts,
            "by_position": [round(share, 4) for share in acceptance.conditional],
            "expected_tokens_by_draft_length": {
                str(n): round(acceptance.expected_tokens(n), 4)
                for n in range(1, len(acceptance.held) + 1)
            },
        },
        "made_with": {"torch": torch.__version__, "python": platform.python_version()},
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
