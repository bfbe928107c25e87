"""The packaged head is for the default model and predicts its tokens."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.model.tiny_llama import BLOCK_SIZE, empty_cache, step_of
from worker.models.draft_head import load_draft_head, shipped_head
from worker.models.loader import load_model
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import build_tokenizer

# A greedy answer of this length fits in the cache of `empty_cache`.
ANSWER_TOKENS = 64
PROMPT = "<|im_start|>user\nWrite a short letter to my aunt.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.full
@pytest.mark.model
@torch.inference_mode()
def test_the_shipped_head_predicts_the_default_model(model_path: Path, tmp_path: Path) -> None:
    """The card promises more than this third on average, but the files are small."""
    target = load_model(model_path, torch.float32, torch.device("cpu"), 256)
    path = shipped_head(target, tmp_path)
    assert path is not None
    card = json.loads(path.with_suffix(".json").read_text())
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 12e6
    assert card["acceptance"]["expected_tokens_by_draft_length"]["3"] > 1.7

    tokens = build_tokenizer(read_checkpoint(model_path)).encode(PROMPT, add_special_tokens=False)
    num_prompt, cache = len(tokens), empty_cache(target.config)
    table = range(-(-(num_prompt + ANSWER_TOKENS) // BLOCK_SIZE))
    parts = [target.states(step_of(tokens, 0, table), cache)]
    for _ in range(ANSWER_TOKENS):
        tokens.append(int(target.logits(parts[-1][-1:]).argmax()))
        step = step_of(tokens[-1:], len(tokens) - 1, table)
        parts.append(target.states(step, cache))
    head = load_draft_head(path, target)
    step = step_of(tokens[1:], 0, table)
    hidden = head.forward(torch.cat(parts)[:-1], step, empty_cache(head.config))
    drafts = head.draft_vocab[head.logits(hidden).argmax(dim=-1)].tolist()
    pairs = list(zip(drafts, tokens[2:], strict=False))[num_prompt - 1 :]
    assert sum(draft == token for draft, token in pairs) > len(pairs) / 3
