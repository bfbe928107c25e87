"""A whole engine on flash-attn answers as on torch; the package is a fake of plain torch."""

import dataclasses
import sys
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model.tiny_llama import TINY, tiny_llama
from tests.support.model.whole_engine import Way, run_way, tokens_of
from worker.config import EngineConfig
from worker.engine.messages import AddRequest
from worker.errors import ConfigError
from worker.executor import start
from worker.executor.kv_cache import allocate
from worker.executor.model_runner import ModelRunner
from worker.executor.start import build_executor, choose_backend
from worker.models.llama import LlamaModel
from worker.ops.backends import TORCH, Backend
from worker.ops.flash_attention import FlashBackend
from worker.types import SamplingParams

BLOCK, NUM_BLOCKS = 256, 12
CUDA, HALF = torch.device("cuda"), torch.bfloat16
MODEL = dataclasses.replace(TINY, max_context=1024)


def flash_attn_varlen_func(  # the parameters are the package's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The package documents that causal masks and windows are aligned at the end."""
    assert block_table is not None
    assert {block_table.dtype, cu_seqlens_q.dtype, cu_seqlens_k.dtype} == {torch.int32}
    assert k.shape[1] % 256 == 0
    assert {x.stride(-1) for x in (q, k, v, block_table)} == {1}
    outputs = []
    queries, contexts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(contexts)) <= (max_seqlen_q, max_seqlen_k)
    for index, (rows, context) in enumerate(zip(queries, contexts, strict=True)):
        query = q[int(cu_seqlens_q[index]) :][:rows]
        blocks = block_table[index, : -(-context // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:context] for x in (k, v))
        sharing = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(sharing, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * (softmax_scale or q.shape[2] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        last = torch.arange(rows)[:, None] + context - rows
        places = torch.arange(context)[None]
        hidden = places > last if causal else torch.zeros(rows, context, dtype=torch.bool)
        left, right = window_size
        if left >= 0:
            hidden |= places < last - left
        if right >= 0:
            hidden |= places > last + right
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def requests() -> list[AddRequest]:
    draw = Random(6)
    stem = [draw.randrange(61) for _ in range(270)]
    made = []
    for index, length in enumerate((3, 40, 255, 256, 300, 7, 60)):
        own = [draw.randrange(61) for _ in range(length)]
        heat = {"temperature": 0.8} if index % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=9, seed=index, ignore_eos=True, **heat)
        prompt = (stem if index > 4 else []) + own + own[:6]
        made.append(AddRequest(str(index), prompt, params, 0.0))
    return made


def run(model: LlamaModel, backend: Backend, drafts: int) -> dict[str, list[int]]:
    served = dataclasses.replace(model, backend=backend)
    args = (NUM_BLOCKS, BLOCK, model.config, torch.float32, model.device)
    runner = ModelRunner(served, lambda: served, lambda: allocate(*args))
    way = Way(NUM_BLOCKS, 100, 5, overlap=True, drafts=drafts, block_size=BLOCK)
    return tokens_of(run_way(runner, way, requests()))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (20, 0.0), (None, 0.7), (300, 2.0)])
def test_an_engine_answers_as_on_torch(window: int | None, softcap: float, drafts: int) -> None:
    made = tiny_llama(config=dataclasses.replace(MODEL, attention_softcap=softcap))
    first, *others = made.layers
    model = dataclasses.replace(made, layers=(dataclasses.replace(first, window=window), *others))
    flash = FlashBackend(TORCH, flash_attn_varlen_func)
    assert run(model, flash, drafts) == run(model, TORCH, drafts)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(start, "_triton", lambda _: TORCH)


@pytest.mark.usefixtures("installed")
def test_it_is_used_where_it_is_asked_for() -> None:
    assert isinstance(choose_backend("flash-attn", CUDA, HALF, 512), FlashBackend)


@pytest.mark.usefixtures("installed")
def test_auto_takes_triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set[str]({"triton", "flash_attn"})
    monkeypatch.setattr(start, "find_spec", lambda name: name in found or None)
    assert choose_backend("auto", CUDA, HALF, 256) is TORCH  # what stands for Triton here
    found.remove("triton")
    assert choose_backend("auto", CUDA, HALF, 256).name == "flash-attn"
    assert choose_backend("auto", CUDA, HALF, 16).name == "torch"
    assert choose_backend("auto", torch.device("cpu"), HALF, 256).name == "torch"
    found.clear()
    assert choose_backend("auto", CUDA, HALF, 256).name == "torch"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("device", "dtype", "block_size", "reason"),
    [
        (torch.device("cpu"), HALF, 256, "takes a GPU: leave the flag out"),
        (CUDA, torch.float32, 256, "takes --dtype bfloat16 or float16"),
        (CUDA, HALF, 16, r"takes blocks of a multiple of 256 tokens: set --block-size 256, not 16"),
    ],
)
def test_unsupported_settings_are_refused_with_the_reason(
    device: torch.device, dtype: torch.dtype, block_size: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--attention-backend flash-attn {reason}$"):
        choose_backend("flash-attn", device, dtype, block_size)


@pytest.mark.usefixtures("installed")
def test_old_gpus_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"capability 8\.0 or higher"):
        choose_backend("flash-attn", CUDA, HALF, 256)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package flash-attn"):
        choose_backend("flash-attn", CUDA, HALF, 256)


@pytest.mark.parametrize("head_dim", [260, 20])
def test_heads_of_other_sizes_are_refused_before_anything_is_read(
    head_dim: int, monkeypatch: pytest.MonkeyPatch, make_checkpoint: Any
) -> None:
    flash = FlashBackend(TORCH, flash_attn_varlen_func)
    monkeypatch.setattr(start, "choose_backend", lambda *_: flash)
    path = make_checkpoint(1, hidden_size=4 * head_dim)
    config = EngineConfig("torch", str(path), "float32", attention_backend="flash-attn")
    with pytest.raises(ConfigError, match=f"takes heads of .* have {head_dim}: choose another"):
        build_executor(config)
