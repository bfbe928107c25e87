"""Whole answers match transformers token for token, for any chunks and batches."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.depth import some
from tests.support.model.model_variants import HF_VARIANTS, VARIANTS
from tests.support.model.quantized_checkpoints import FORMATS, quantize
from tests.support.model.tiny_llama import empty_cache, step_of
from worker.executor.kv_cache import allocate
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.loader import load_model
from worker.ops.cpu.native import CpuKernels, open_kernels
from worker.types import ScheduledSequence

CPU = torch.device("cpu")
NUM_TOKENS = 24
CHUNK = 29
LENGTHS = (70, 101, 83)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels | None:
    if request.param == "torch":
        return None
    found = open_kernels(2)
    if found is None:
        pytest.skip("the native kernels are not built")
    return found


def answers(path: Path, prompts: list[list[int]], kernels: CpuKernels | None) -> list[list[int]]:
    """Each prompt starts one step later than the one before, and runs in chunks."""
    with torch.inference_mode():
        model = load_model(path, torch.float32, CPU, kernels=kernels)
        cache = allocate(45, 16, model.config, torch.float32, CPU)
        texts = [list(prompt) for prompt in prompts]
        done = [0] * len(texts)
        wanted = [len(prompt) + NUM_TOKENS for prompt in prompts]
        turn = 0
        state = DeviceState(16, CPU)
        while any(len(text) < end for text, end in zip(texts, wanted, strict=True)):
            turn += 1
            running = [i for i in range(min(turn, len(texts))) if len(texts[i]) < wanted[i]]
            shares = {i: texts[i][done[i] : done[i] + CHUNK] for i in running}
            batch = [
                ScheduledSequence(i, share, done[i], list(range(15 * i, 15 * i + 15)))
                for i, share in shares.items()
            ]
            step = StepBatch(batch, state).tensors
            step = dataclasses.replace(step, sample_rows=step.query_starts[1:] - 1)
            drawn = model.forward(step, cache).argmax(dim=-1).tolist()
            for i, token in zip(running, drawn, strict=True):
                done[i] += len(shares[i])
                if done[i] == len(texts[i]):
                    texts[i].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def shortfalls(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """All are 0 exactly if transformers' greedy answer is the same: by induction, each token is its
    argmax.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()
    return logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("variant", some(VARIANTS | HF_VARIANTS))
def test_answers_match_transformers(
    variant: str, kernels: CpuKernels | None, save_tiny: Callable[..., Any]
) -> None:
    """Prompts are longer than the windows, and rounding may decide ties."""
    kind, changes = (VARIANTS | HF_VARIANTS)[variant]
    saved = save_tiny(kind, **changes)
    prompts = [saved.token_ids[n : n + length] for n, length in enumerate(LENGTHS)]
    found = answers(saved.path, prompts, kernels)
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer) == NUM_TOKENS
        assert float(shortfalls(saved.model, prompt, answer).max()) < 1e-3


@torch.inference_mode()
def test_states_that_enter_layers_match_transformers(
    kernels: CpuKernels | None, save_tiny: Callable[..., Any]
) -> None:
    saved = save_tiny(num_hidden_layers=4)
    model = load_model(saved.path, torch.float32, CPU, kernels=kernels)
    tokens, order = saved.token_ids[:20], (3, 0, 1, 3)
    expected = saved.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    step, cache = step_of(tokens, 0, range(5)), empty_cache(model.config)
    states, inputs = model.states_and_inputs(step, cache, order)
    for found, layer in zip(inputs, order, strict=True):
        torch.testing.assert_close(found, expected[layer][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.normed(states), expected[4][0], rtol=1e-4, atol=1e-4)


QUANTIZED = [
    *(("Llama", {}, name, "") for name in FORMATS),
    ("Qwen2", {}, "gptq, act order", ""),
    ("Llama", {}, "awq", "v_proj"),
    ("Phi3", VARIANTS["phi3, partly rotated, with a window"][1], "fp8, blocks", ""),
    ("Phi3", VARIANTS["phi3, partly rotated, with a window"][1], "awq", ""),
    ("Gemma2", VARIANTS["gemma2"][1], "gptq, zeros", ""),
    ("Mixtral", VARIANTS["mixtral"][1], "gptq", "mlp.gate"),
    ("Mixtral", VARIANTS["mixtral"][1], "compressed, channel", "mlp.gate"),
]


@pytest.mark.parametrize(("kind", "changes", "form", "unchanged"), some(QUANTIZED))
def test_answers_of_quantised_checkpoints_match_transformers(
    kind: str,
    changes: dict[str, Any],
    form: str,
    unchanged: str,
    kernels: CpuKernels | None,
    save_tiny: Callable[..., Any],
) -> None:
    saved = save_tiny(kind, **{**changes, "intermediate_size": 128})
    model = (
        AutoModelForCausalLM.from_pretrained(quantize(saved.path, form, unchanged)).float().eval()
    )
    prompts = [saved.token_ids[n : n + length] for n, length in enumerate(LENGTHS)]
    found = answers(saved.path, prompts, kernels)
    for prompt, answer in zip(prompts, found, strict=True):
        assert float(shortfalls(model, prompt, answer).max()) < 1e-3
