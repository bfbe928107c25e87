"""Greedy answers of the native CPU kernels beside those of their float32 twin in torch.

    python benchmarks/native_exactness.py [--model FILE.gguf] [--prompts 200] [--tokens 24]

Prompts are passages of this repository's documentation, chosen by a fixed seed. Both models decode
them together, greedily; where two answers part, the margin is how far apart the twin had the two
tokens' logits, against the largest difference of logits that rounding makes anywhere. Writes
benchmarks/results/native_exactness.json.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from result_files import RESULTS, write_results
from torch import Tensor

from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.cpu.native import open_kernels
from worker.ops.step import StepTensors
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer

SEED = 20261126
BLOCK_SIZE = 16
PROMPT_TOKENS = 48
DEFAULT_MODEL = Path.home() / ".cache/pointsman/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def passages(model: Path, count: int) -> list[list[int]]:
    """Tokens of passages of the documentation."""
    tokenizer = build_tokenizer(read_checkpoint(model))
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    draw = random.Random(SEED)
    starts = [draw.randrange(len(text) - 1000) for _ in range(count)]
    return [
        tokenizer.encode(text[s : s + 1000], add_special_tokens=False)[:PROMPT_TOKENS]
        for s in starts
    ]


class Decoding:
    """Texts of equal length that one model decodes together."""

    def __init__(self, model: LlamaModel, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._model = model
        self._blocks = -(-(PROMPT_TOKENS + tokens) // BLOCK_SIZE)
        config = model.config
        self._cache = torch.zeros(
            *(config.num_layers, len(prompts) * self._blocks, 2),
            *(config.num_kv_heads, BLOCK_SIZE, config.head_dim),
        )
        self._length = 0
        self.logits = self.run([list(prompt) for prompt in prompts])

    def run(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after the next tokens of each text."""
        count, texts = len(tokens[0]), len(tokens)
        start, self._length = self._length, self._length + count
        positions = torch.arange(start, start + count, dtype=torch.int32).repeat(texts)
        tables = torch.arange(texts * self._blocks, dtype=torch.int32).view(texts, -1)
        slots = (tables * BLOCK_SIZE)[:, :, None] + torch.arange(BLOCK_SIZE, dtype=torch.int32)
        step = StepTensors(
            token_ids=torch.tensor([t for own in tokens for t in own], dtype=torch.int32),
            positions=positions,
            slots=slots.view(texts, -1)[:, start : start + count].reshape(-1).contiguous(),
            query_starts=torch.arange(texts + 1, dtype=torch.int32) * count,
            context_lens=torch.full((texts,), self._length, dtype=torch.int32),
            block_tables=tables,
            sample_rows=(torch.arange(texts, dtype=torch.int32) + 1) * count - 1,
            max_rows=count,
            max_context=self._length,
        )
        return self._model.forward(step, self._cache)


def main() -> None:
    """Decode, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    kernels = open_kernels(torch.get_num_threads())
    if kernels is None:
        raise SystemExit("there are no native kernels here")
    prompts = passages(options.model, options.prompts)
    cpu = torch.device("cpu")
    with torch.inference_mode():
        twin, native = (
            Decoding(
                load_model(options.model, torch.float32, cpu, 4096, kernels=k),
                prompts,
                options.tokens,
            )
            for k in (None, kernels)
        )
        apart: dict[int, float] = {}
        rounding = 0.0
        for _ in range(options.tokens):
            wanted, found = twin.logits.argmax(-1), native.logits.argmax(-1)
            same = [i for i in range(len(prompts)) if i not in apart]
            rounding = max(rounding, float((twin.logits - native.logits)[same].abs().max()))
            for i in (wanted != found).nonzero().flatten().tolist():
                if i not in apart:
                    apart[i] = float(twin.logits[i, wanted[i]] - twin.logits[i, found[i]])
            tokens = wanted[:, None].tolist()  # the twin's, so that later steps compare as well
            twin.logits, native.logits = twin.run(tokens), native.run(tokens)
    equal = 1 - len(apart) / len(prompts)
    print(f"{kernels.isa}: {equal:.1%} of {len(prompts)} answers of {options.tokens} tokens equal")
    print(f"largest difference of logits {rounding:.2g}; margins where answers part:")
    print(sorted(round(margin, 6) for margin in apart.values()))
    write_results(
        RESULTS / "native_exactness.json",
        {"isa": kernels.isa, "equal": equal, "rounding": rounding, "margins": apart},
    )


if __name__ == "__main__":
    main()
