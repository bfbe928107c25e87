"""Checkpoints in FP8, AWQ and GPTQ, written bit by bit, beside the numbers that they stand for."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
# Names of tensors behind a module's, and the float32 weight that they stand for.
Writer = Callable[[Tensor], tuple[Parts, Tensor]]

LARGEST_E4M3 = 448.0
PROJECTION = re.compile(r"(_proj|\.w[123])\.weight$")


def fp8(
    weight: Tensor,
    strategy: str,
    scale_name: str = "weight_scale",
    block: tuple[int, int] = (48, 32),
    static: bool = False,
) -> tuple[Parts, Tensor]:
    """Quantise with one scale for the tensor, for a row ("channel") or for a block."""
    out, inputs = weight.shape
    high, wide = {"tensor": (out, inputs), "channel": (1, inputs), "block": block}[strategy]
    scales = torch.empty(-(-out // high), -(-inputs // wide))
    each = torch.empty_like(weight)
    for r in range(len(scales)):
        for c in range(scales.shape[1]):
            place = slice(r * high, (r + 1) * high), slice(c * wide, (c + 1) * wide)
            scales[r, c] = weight[place].abs().max() / LARGEST_E4M3
            each[place] = scales[r, c]
    codes = (weight / each).to(torch.float8_e4m3fn)
    if strategy == "tensor":
        scales = scales.reshape(() if static else 1)
    parts = {"weight": codes, scale_name: scales}
    if static:
        parts["input_scale"] = torch.tensor(0.02)
    return parts, codes.float() * each


def codes_of(
    weight: Tensor, bits: int, groups: np.ndarray[Any, Any], symmetric: bool
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return codes [out, in], and scales (float16) and zeros [out, groups]."""
    values, top = weight.numpy(), 2**bits - 1
    count = int(groups.max()) + 1
    scales = np.empty((len(values), count), np.float16)
    zeros = np.empty((len(values), count), np.int64)
    codes = np.empty(values.shape, np.int64)
    for group in range(count):
        columns = np.flatnonzero(groups == group)
        part = values[:, columns]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = (high - low) / top
        scale = scales[:, group].astype(np.float32)
        zeros[:, group] = (top + 1) // 2 if symmetric else np.rint(-low / scale)
        shifted = np.rint(part / scale[:, None]) + zeros[:, group, None]
        codes[:, columns] = np.clip(shifted, 0, top)
    return codes, scales, zeros


def decoded(
    codes: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    zeros: np.ndarray[Any, Any],
    groups: np.ndarray[Any, Any],
) -> Tensor:
    return torch.tensor((codes - zeros[:, groups]) * scales.astype(np.float32)[:, groups]).float()


def words(codes: np.ndarray[Any, Any], bits: int, places: list[int] | None = None) -> Tensor:
    """Pack codes [n, m] into int32 words along m; place k of a word has code `places[k]`."""
    each = 32 // bits
    places = places or list(range(each))
    packed = np.zeros((len(codes), codes.shape[1] // each), np.uint32)
    for place, own in enumerate(places):
        packed |= codes[:, own::each].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def awq(weight: Tensor, group_size: int) -> tuple[Parts, Tensor]:
    """AWQ is transposed, with words along the outputs, whose codes are interleaved."""
    groups = np.arange(weight.shape[1]) // group_size
    codes, scales, zeros = codes_of(weight, 4, groups, symmetric=False)
    interleaved = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        "qweight": words(codes.T, 4, interleaved),
        "qzeros": words(zeros.T, 4, interleaved),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return parts, decoded(codes, scales, zeros, groups)


def gptq(
    weight: Tensor,
    group_size: int,
    bits: int = 4,
    symmetric: bool = False,
    act_order: bool = False,
    version: int = 1,
) -> tuple[Parts, Tensor]:
    """GPTQ is transposed, with words along the inputs and zeros along the outputs."""
    out, inputs = weight.shape
    size = inputs if group_size == -1 else group_size
    groups = np.arange(inputs) // size
    if act_order:
        groups = groups[np.random.default_rng(inputs).permutation(inputs)]
    codes, scales, zeros = codes_of(weight, bits, groups, symmetric)
    stored = (zeros - (version == 1)) % 2**bits
    parts = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(stored.T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
        # AutoGPTQ writes a bias where the model has none.
        "bias": torch.zeros(out, dtype=torch.float16),
    }
    return parts, decoded(codes, scales, zeros, groups)


def compressed(strategy: str, **weights: object) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    write: Writer


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
FORMATS = {
    "fp8": Format({"quant_method": "fp8"}, partial(fp8, strategy="tensor")),
    "fp8, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        partial(fp8, strategy="tensor", static=True),
    ),
    "fp8, blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 32]},
        partial(fp8, strategy="block", scale_name="weight_scale_inv"),
    ),
    "compressed, tensor": Format(compressed("tensor"), partial(fp8, strategy="tensor")),
    "compressed, channel": Format(compressed("channel"), partial(fp8, strategy="channel")),
    "compressed, block": Format(
        compressed("block", block_structure=[48, 32]), partial(fp8, strategy="block")
    ),
    "awq": Format({**AWQ, "group_size": 32}, partial(awq, group_size=32)),
    "awq, large groups": Format({**AWQ, "group_size": 64}, partial(awq, group_size=64)),
    "gptq": Format(GPTQ, partial(gptq, group_size=32, symmetric=True)),
    "gptq, zeros": Format({**GPTQ, "sym": False}, partial(gptq, group_size=32)),
    "gptq, second version": Format(
        {**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, group_size=32, version=2)
    ),
    "gptq, one group": Format(
        {**GPTQ, "group_size": -1}, partial(gptq, group_size=-1, symmetric=True)
    ),
    "gptq, act order": Format(
        {**GPTQ, "desc_act": True}, partial(gptq, group_size=32, act_order=True)
    ),
    "gptq, 8 bits": Format(
        {**GPTQ, "bits": 8}, partial(gptq, group_size=32, bits=8, symmetric=True)
    ),
    "gptq, 8 bits, zeros": Format(
        {**GPTQ, "bits": 8, "group_size": 64}, partial(gptq, group_size=64, bits=8)
    ),
}


def quantize(path: Path, name: str, unchanged: str = "") -> Path:
    """Quantise the projections of a checkpoint in place, except names with `unchanged`; return the
    path of a second checkpoint, which has the weights that the first one stands for.
    """
    chosen = FORMATS[name]
    tensors, settings = load_file(path / "model.safetensors"), path / "config.json"
    stored, stands_for = {}, {}
    for tensor, values in tensors.items():
        stands_for[tensor] = values
        if not PROJECTION.search(tensor) or (unchanged and unchanged in tensor):
            stored[tensor] = values
            continue
        parts, weight = chosen.write(values.float())
        stem = tensor.removesuffix(".weight")
        own = {f"{stem}.{part}": content for part, content in parts.items()}
        stored.update({n: content for n, content in own.items() if n not in tensors or n == tensor})
        stands_for[tensor] = weight
    beside = path.with_name(f"{path.name}-decoded")
    beside.mkdir()
    (beside / "config.json").write_text(settings.read_text())
    save_file(stands_for, beside / "model.safetensors", {"format": "pt"})
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps({**config, "quantization_config": chosen.config}))
    return beside
