"""Types of weights and of the KV cache on a CPU: what they take and answer, and what is refused."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.depth import by_depth
from tests.support.model.tiny_checkpoint import edit, rewritten, save_random_head
from tests.support.model.tiny_llama import BLOCK_SIZE, step_of
from tests.support.model.whole_engine import outputs_of, tokens_of
from worker.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.messages import AddRequest
from worker.engine.process.build import build_core
from worker.errors import ConfigError, ModelError
from worker.executor.kv_cache import allocate
from worker.executor.start import EIGHT_BITS, build_executor, choose_kernels, choose_kv_dtype
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.backends import TORCH
from worker.ops.cpu import native
from worker.ops.cpu.native import BlockLinear, CpuKernels, open_kernels
from worker.types import SamplingParams

CPU = torch.device("cpu")
TEXT = [5, 17, 80, 3, 9, 33, 21, 60, 2, 95]
# Bits of a weight as the kernels hold it, scales included.
BITS = {"q8_0": 9, "q4_1": 5}


@pytest.fixture
def kernels() -> CpuKernels:
    found = open_kernels(2)
    if found is None:
        pytest.skip("no native kernels are installed")
    return found


def each(change: Callable[[str, Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {name: change(name, tensor) for name, tensor in tensors.items()}


def loaded(path: Path, kernels: CpuKernels, quantization: str = "none") -> LlamaModel:
    return load_model(path, torch.float32, CPU, kernels=kernels, quantization=quantization)


@torch.inference_mode()
def logits(model: LlamaModel) -> torch.Tensor:
    step = replace(step_of(TEXT, 0, [2, 0, 1]), sample_rows=torch.arange(len(TEXT)))
    return model.forward(step, allocate(3, BLOCK_SIZE, model.config, torch.float32, CPU))


def products(model: LlamaModel) -> list[BlockLinear]:
    layers = [part for x in model.layers for part in (x.qkv, x.output, x.gate_up, x.down)]
    tables = [model.embedding] if model.embedding is model.head else [model.embedding, model.head]
    found = [part for part in (*tables, *layers) if isinstance(part, BlockLinear)]
    assert len(found) == len(tables) + len(layers)
    return found


def held_bytes(parts: Sequence[BlockLinear]) -> int:
    return sum(part.num_bytes - 64 * part.layer.count for part in parts)


def elements(parts: Sequence[BlockLinear]) -> int:
    """The rows of products are filled up to groups of 16."""
    return sum(-(-part.shape[0] // 16) * 16 * part.shape[1] for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_stay_as_they_are_stored(
    dtype: torch.dtype,
    kernels: CpuKernels,
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    half, single = (tmp_path_factory.mktemp(name) for name in ("half", "single"))
    model = loaded(rewritten(tiny_checkpoint, half, each(lambda _, t: t.to(dtype))), kernels)
    twin = loaded(rewritten(half, single, each(lambda _, t: t.float())), kernels)
    assert held_bytes(products(model)) == 2 * elements(products(model))
    assert held_bytes(products(twin)) == 4 * elements(products(twin))
    assert torch.equal(logits(model), logits(twin))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("quantization", BITS)
def test_a_quantised_model_is_that_of_its_rounded_weights(
    quantization: str,
    source: torch.dtype,
    kernels: CpuKernels,
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Rows of 80 are no whole blocks, and stay as they are."""
    original, rounded = (tmp_path_factory.mktemp(name) for name in ("original", "rounded"))
    kind = gguf.GGMLQuantizationType[quantization.upper()]

    def decoded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or "down_proj" in name:
            return tensor.float()
        blocks = gguf.quants.quantize(tensor.float().numpy(), kind)
        return torch.tensor(gguf.quants.dequantize(blocks, kind))

    path = rewritten(tiny_checkpoint, original, each(lambda _, t: t.to(source)))
    model = loaded(path, kernels, quantization)
    twin = loaded(rewritten(path, rounded, each(decoded)), kernels)
    error = (logits(model) - logits(twin)).abs().max()
    assert error < 1e-3 * (logits(model) - logits(loaded(path, kernels))).abs().max()
    whole = [part for part in products(model) if part.shape[1] % 32 == 0]
    assert len(whole) == len(products(model)) - 2
    assert held_bytes(whole) == elements(whole) * BITS[quantization] // 8


def test_an_untied_head_is_converted_too(
    kernels: CpuKernels, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_checkpoint(seed=3, tie_word_embeddings=False)
    embedding = "model.embed_tokens.weight"
    flipped = rewritten(
        path, tmp_path, lambda t: t | {"lm_head.weight": t[embedding].flip(0).contiguous()}
    )
    model = loaded(flipped, kernels, "q4_1")
    head, embedding = model.head, model.embedding
    assert isinstance(head, BlockLinear)
    assert held_bytes([head]) == elements([head]) * 5 // 8
    assert torch.equal(head.rows(torch.tensor([0])), embedding.rows(torch.tensor([95])))


# ---- what the executor is built of ----


def config(path: Path | str, **changes: object) -> EngineConfig:
    limits = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8, max_model_len=128)
    return replace(
        EngineConfig("torch", str(path), num_blocks_override=32, scheduler=limits), **changes
    )


@pytest.mark.parametrize("level", [1, 2])
def test_a_quantised_model_wakes_as_it_was(
    level: int, kernels: CpuKernels, tiny_checkpoint: Path
) -> None:
    executor, _ = build_executor(
        config(tiny_checkpoint, quantization="q8_0", kv_cache_dtype="bfloat16")
    )
    before = held_bytes(products(executor._awake()[0]))
    executor.sleep(level)
    executor.wake(frozenset({"weights", "kv_cache"}))
    model, cache = executor._awake()
    assert held_bytes(products(model)) == before
    assert cache.dtype is torch.bfloat16


def test_a_quantised_file_is_not_quantised_again(kernels: CpuKernels, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"^--quantization q4_1: .*model.gguf is a GGUF file.*leave"
    ):
        build_executor(config(path, quantization="q4_1"))


def test_missing_requirements_of_quantisation_are_errors(
    kernels: CpuKernels, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tiny_checkpoint, quantization="q8_0")
    with pytest.raises(ConfigError, match=r"^--quantization q8_0 is for a CPU"):
        choose_kernels(asked, torch.device("cuda"), torch.bfloat16)
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match=f"^--quantization q8_0 goes with .* not {dtype}"):
            build_executor(replace(asked, dtype=dtype))
    with pytest.raises(ConfigError, match=r"^--quantization q8_0: a draft head .* another method"):
        build_executor(replace(asked, speculative=SpeculativeConfig("eagle", 3)))
    large = json.loads((tiny_checkpoint / "config.json").read_text()) | {"head_dim": 320}
    (tmp_path / "config.json").write_text(json.dumps(large))
    tensors = {}
    for name, tensor in load_file(tiny_checkpoint / "model.safetensors").items():
        heads = 4 if "q_proj" in name else 2
        if "q_proj" in name or "k_proj" in name or "v_proj" in name:
            tensor = torch.zeros(320 * heads, 64)
        tensors[name] = torch.zeros(64, 1280) if "o_proj" in name else tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"^--quantization q8_0: no native kernels for the layers"
    ):
        build_executor(config(tmp_path, quantization="q8_0"))
    monkeypatch.setenv(native.ISA_VARIABLE, "mmx")
    with pytest.raises(ConfigError, match=r"^--quantization q8_0 needs the native kernels"):
        build_executor(asked)


def test_the_cache_is_like_activations_or_in_bfloat16_beside_float32() -> None:
    cuda, single, half = torch.device("cuda"), torch.float32, torch.bfloat16
    assert choose_kv_dtype("auto", CPU, single, TORCH) is single
    assert choose_kv_dtype("auto", cuda, torch.float16, TORCH) is torch.float16
    assert choose_kv_dtype("float32", CPU, single, TORCH) is single
    assert choose_kv_dtype("bfloat16", CPU, single, TORCH) is half
    assert choose_kv_dtype("bfloat16", cuda, half, TORCH) is half
    refused = [("float32", CPU, half), ("float32", cuda, half), ("bfloat16", cuda, single)]
    for name, device, dtype in refused:
        with pytest.raises(ConfigError, match=f"^--kv-cache-dtype {name} takes a CPU"):
            choose_kv_dtype(name, device, dtype, TORCH)


def test_a_cache_of_eight_bits_takes_triton_and_a_gpu_that_has_them(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    triton: Any = SimpleNamespace(name="triton")
    cuda, half = torch.device("cuda"), torch.bfloat16
    for capability in ((8, 6), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        for name in EIGHT_BITS:
            if capability >= (8, 9):
                assert choose_kv_dtype(name, cuda, half, triton) is torch.float8_e4m3fn
            else:
                with pytest.raises(ConfigError, match=f"^--kv-cache-dtype {name} .* 8.9 or higher"):
                    choose_kv_dtype(name, cuda, half, triton)
        with pytest.raises(ConfigError, match=r"^--kv-cache-dtype fp8 takes .*backend is torch: "):
            choose_kv_dtype("fp8", cuda, half, TORCH)
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype fp8 takes .*bfloat16 on a CPU"):
        build_executor(config(tiny_checkpoint, kv_cache_dtype="fp8"))


@pytest.mark.parametrize(
    "form", ["{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale"]
)
def test_scales_of_the_cache_are_read_from_the_checkpoint(
    form: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    scales = {
        f"model.layers.1.self_attn.{form.format(part, part)}": scale
        for part, scale in (("k", torch.tensor(0.5)), ("v", torch.tensor([2.0, 4.0])))
    }
    rewritten(tiny_checkpoint, tmp_path, lambda tensors: tensors | scales)
    first, second = load_model(tmp_path, torch.float32, CPU).layers
    assert first.kv_scales is None
    assert second.kv_scales is not None
    assert second.kv_scales.tolist() == [[0.5, 0.5], [2.0, 4.0]]
    name = f"model.layers.0.self_attn.{form.format('k', 'k')}"
    for wrong in (torch.tensor(0.0), torch.tensor(torch.nan), torch.ones(3)):
        edit(tmp_path, lambda tensors, wrong=wrong: tensors.update({name: wrong}))
        with pytest.raises(ModelError, match=f"{name} must be a positive number"):
            load_model(tmp_path, torch.float32, CPU)


def test_the_same_memory_holds_twice_the_blocks(tiny_checkpoint: Path) -> None:
    asked = config(tiny_checkpoint, num_blocks_override=None, kv_cache_memory_bytes=1 << 18)
    counts = {}
    for name in ("auto", "bfloat16"):
        executor, counts[name] = build_executor(replace(asked, kv_cache_dtype=name))
        assert executor._awake()[1].nbytes == 1 << 18
    assert counts["bfloat16"] == 2 * counts["auto"]


LENGTH = by_depth(12, 24)


def answers(asked: EngineConfig, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], int]:
    core, _ = build_core(asked, time.monotonic)
    params = [
        SamplingParams(max_tokens=LENGTH, temperature=t, seed=7, ignore_eos=True)
        for t in (0.0, 0.9)
    ]
    requests = [
        AddRequest(name, prompt, params[int(name) % 2], float(index))
        for index, (name, prompt) in enumerate(prompts.items())
    ]
    found = tokens_of(outputs_of(core, requests))
    core.shutdown()
    assert all(len(tokens) == LENGTH for tokens in found.values())
    return found, core._scheduler.stats().scheduler.num_preemptions


@pytest.mark.parametrize("isa", ["", "portable", "mmx"])
def test_a_rounded_cache_answers_alike_alone_and_together(
    isa: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pool is too small for all, and there are prefix hits, chunked prompts and drafts."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    rng = Random(20261126)
    shared = [rng.randrange(96) for _ in range(37)]
    prompts = {
        str(i): (shared if i % 3 else []) + [rng.randrange(96) for _ in range(rng.randrange(3, 40))]
        for i in range(8)
    }
    rounded = config(tiny_checkpoint, kv_cache_dtype="bfloat16", num_blocks_override=18)
    together, num_preemptions = answers(rounded, prompts)
    assert num_preemptions > 0
    for name, prompt in list(prompts.items())[:: by_depth(3, 1)]:
        assert answers(rounded, {name: prompt}) == ({name: together[name]}, 0)
    head = save_random_head(tiny_checkpoint, tmp_path / "head.safetensors")
    for method, model in (("draft_model", str(tiny_checkpoint)), ("eagle", head)):
        drafts = SpeculativeConfig(method, 3, model=model, enable_adaptive_verification=False)
        drafting = replace(rounded, speculative=drafts)
        assert answers(drafting, prompts)[0] == together
        drafter = build_executor(drafting)[0]._drafter
        assert drafter is not None
        assert drafter._awake()[1].kv.dtype is torch.bfloat16
    assert "drafting failed" not in caplog.text
    exact = answers(replace(rounded, kv_cache_dtype="auto"), prompts)[0]
    assert exact != together
