"""Weights in FP8, AWQ and GPTQ are decoded exactly, or an error names the problem."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.model.model_variants import VARIANTS
from tests.support.model.quantized_checkpoints import AWQ, FORMATS, GPTQ, compressed, quantize
from tests.support.model.tiny_checkpoint import configure, edit
from worker.errors import ConfigError, ModelError
from worker.models.checkpoints import SafetensorsCheckpoint, read
from worker.models.loader import load_model
from worker.ops.cpu.native import BlockLinear, open_kernels
from worker.ops.quantized import QuantizedLinear, multiply, pack

CPU = torch.device("cpu")
PREFIX = "model.layers.0."
PHI3 = VARIANTS["phi3, partly rotated, with a window"]


def set_quantization(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    configure(path, quantization_config=config["quantization_config"] | changes)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_decoded_exactly(form: str, save_tiny: Callable[..., Any]) -> None:
    path = save_tiny("Llama", intermediate_size=128).path
    wanted = load_file(quantize(path, form) / "model.safetensors")
    file = SafetensorsCheckpoint(path)
    assert file.shapes() == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    for name, tensor in wanted.items():
        assert torch.equal(read(file, name), tensor.float()), name
    for name, rows, columns in (
        ("mlp.down_proj", slice(0, 64), slice(64, 128)),
        ("mlp.gate_proj", slice(37, 91), slice(13, 50)),
        ("self_attn.k_proj", slice(16, 32), slice(0, 64)),
    ):
        part = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
        whole = wanted[f"{PREFIX}{name}.weight"]
        file.read_into(f"{PREFIX}{name}.weight", part, rows.start, columns.start)
        assert torch.equal(part, whole[rows, columns]), name


@pytest.mark.parametrize("form", [*FORMATS, "phi3"])
def test_packed_weights_are_the_same_numbers(form: str, save_tiny: Callable[..., Any]) -> None:
    kind, changes = PHI3 if form == "phi3" else ("Llama", {})
    path = save_tiny(kind, **{**changes, "intermediate_size": 128}).path
    beside = SafetensorsCheckpoint(quantize(path, "awq" if form == "phi3" else form))
    file = SafetensorsCheckpoint(path)
    names = [f"{PREFIX}self_attn.{part}_proj.weight" for part in "qkv"]
    parts = []
    for name in names:
        rows, columns = (slice(0, size) for size in file.shapes()[name])
        found = file.grouped(name, rows, columns)
        assert found is not None
        parts.append(found)
    packed = pack(parts, CPU)
    assert packed is not None
    wanted = torch.cat([read(beside, name) for name in names])
    assert packed.shape == tuple(wanted.shape)
    bias = torch.randn(len(wanted))
    linear = QuantizedLinear(packed, bias, multiply)
    some = torch.tensor([3, 0, 100])
    assert torch.equal(linear.rows(some), wanted[some])
    x, residual = torch.randn(5, wanted.shape[1]), torch.randn(5, len(wanted))
    torch.testing.assert_close(linear(x), x @ wanted.T + bias)
    torch.testing.assert_close(linear(x, residual), x @ wanted.T + bias + residual)


@pytest.mark.parametrize(
    ("form", "encoding"),
    [
        ("gptq", "Q4_0"),
        ("gptq, one group", "Q4_0"),
        ("gptq, zeros", "Q8_0"),
        ("gptq, 8 bits", "Q8_0"),
        ("gptq, 8 bits, zeros", "F32"),
        ("gptq, act order", "F32"),
        ("awq", "Q8_0"),
        ("compressed, channel", "F32"),
    ],
)
def test_blocks_for_native_kernels_are_the_same_numbers(
    form: str, encoding: str, save_tiny: Callable[..., Any]
) -> None:
    """They take four bits if all zeros are 8, else eight bits, else float32."""
    path = save_tiny("Llama", intermediate_size=128).path
    wanted = load_file(quantize(path, form) / "model.safetensors")
    name = f"{PREFIX}mlp.down_proj.weight"
    stored = SafetensorsCheckpoint(path).stored(name)
    assert stored is not None
    assert stored.type_name == encoding
    kernels = open_kernels(1)
    if kernels is None:
        pytest.skip("the native kernels are not built")
    linear = kernels.linear([stored])
    assert linear is not None
    assert torch.equal(linear.rows(torch.arange(64)), wanted[name])


def test_float8_with_power_of_two_scales_is_bfloat16(save_tiny: Callable[..., Any]) -> None:
    """DeepSeek's scales are powers of two."""
    path = save_tiny("Llama").path
    quantize(path, "compressed, channel")
    scale = f"{PREFIX}mlp.down_proj.weight_scale"
    edit(path, lambda tensors: tensors[scale].fill_(2.0**-9))
    file = SafetensorsCheckpoint(path)
    stored = file.stored(f"{PREFIX}mlp.down_proj.weight")
    assert stored is not None
    assert stored.type_name == "BF16"


def test_float8_is_quantised_at_the_start_on_request(save_tiny: Callable[..., Any]) -> None:
    """`--quantization q8_0` refuses other formats, which are quantised already."""
    kernels = open_kernels(1)
    if kernels is None:
        pytest.skip("the native kernels are not built")
    path = save_tiny("Llama").path
    quantize(path, "fp8")
    model = load_model(path, torch.float32, CPU, kernels=kernels, quantization="q8_0")
    down = model.layers[0].down
    assert isinstance(down, BlockLinear)
    assert down.num_bytes < 64 * 96 * 1.2  # a byte per weight, and a scale for 32
    configure(path, quantization_config=AWQ | {"group_size": 32})
    with pytest.raises(ConfigError, match=r"quantised already, by awq; leave the flag out"):
        load_model(path, torch.float32, CPU, kernels=kernels, quantization="q8_0")


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ([], "quantization_config is not an object"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: fp8, compr"),
        ({"bits": 4}, "quant_method is 'missing'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported: e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            r"weight_block_size is \[0, 128\]",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128, not two"),
        (AWQ, "group_size is missing"),
        ({**AWQ, "group_size": 0}, "group_size 0 is neither"),
        ({**AWQ, "group_size": 32, "bits": 8}, "bits 8 is not supported, only 4"),
        ({**AWQ, "group_size": 32, "version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({**GPTQ, "bits": 3}, "bits 3 is not supported, only 4 and 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic has settings of its own"),
        ({**GPTQ, "dynamic": True}, "dynamic has settings of its own"),
        ({**compressed("tensor"), "config_groups": {"a": {"weights": [1]}}}, "a: weights: type is"),
        ({**compressed("tensor"), "format": "pack-quantized"}, "format is 'pack-quantized'"),
        ({**compressed("tensor"), "config_groups": {}}, "config_groups is missing"),
        ({**compressed("tensor"), "sparsity_config": {"format": "x"}}, "sparsity_config is not"),
        (compressed("tensor", num_bits=4), "group_0: weights: num_bits 4 is not supported"),
        (compressed("tensor", type="int"), "group_0: weights: type is 'int'; supported: float"),
        (compressed("group"), "group_0: weights: strategy is 'group'"),
    ],
)
def test_unsupported_settings_are_named(
    quantization: object, reason: str, save_tiny: Callable[..., Any]
) -> None:
    path = save_tiny().path
    configure(path, quantization_config=quantization)
    with pytest.raises(ModelError, match=reason):
        load_model(path, torch.float32, CPU)


NAME = f"{PREFIX}self_attn.o_proj"


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("fp8", lambda t: t.pop(f"{NAME}.weight_scale"), "missing tensor .*weight_scale"),
        (
            "fp8",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(3)}),
            r"o_proj.weight_scale has shape \[3\], not \[\] or \[1\]",
        ),
        ("awq", lambda t: t.pop(f"{NAME}.qzeros"), "missing tensor .*qzeros"),
        (
            "gptq",
            lambda t: t.update({f"{NAME}.scales": torch.ones(1, 64)}),
            r"o_proj.scales has shape \[1, 64\], not \[2, 64\]",
        ),
        (
            "gptq",
            lambda t: t[f"{NAME}.g_idx"].fill_(2),
            "o_proj.g_idx has groups beyond the 2 with scales",
        ),
        ("gptq", lambda t: t[f"{NAME}.bias"].fill_(1), "unexpected tensors: .*o_proj.bias"),
        (
            "gptq",
            lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"][:4].clone()}),
            r"o_proj.scales has shape \[2, 64\], not \[1, 64\]",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_named(
    form: str,
    change: Callable[[dict[str, Tensor]], object],
    reason: str,
    save_tiny: Callable[..., Any],
) -> None:
    path = save_tiny("Llama").path
    quantize(path, form)
    edit(path, change)
    with pytest.raises(ModelError, match=reason):
        load_model(path, torch.float32, CPU)


def test_scales_without_a_configuration_are_unexpected(save_tiny: Callable[..., Any]) -> None:
    path = save_tiny("Llama").path
    quantize(path, "fp8")
    configure(path, quantization_config=None)
    with pytest.raises(ModelError, match=r"unexpected tensors: .*weight_scale"):
        load_model(path, torch.float32, CPU)


def test_scales_of_an_8_bit_cache_are_read(save_tiny: Callable[..., Any]) -> None:
    path = save_tiny("Llama").path
    quantize(path, "compressed, tensor")
    set_quantization(path, sparsity_config={"format": "dense"}, transform_config={})
    edit(path, lambda tensors: tensors.update({f"{PREFIX}self_attn.k_scale": torch.ones(1)}))
    assert any(layer.kv_scales is not None for layer in load_model(path, torch.float32, CPU).layers)


def test_patterns_of_unquantised_modules_are_accepted(save_tiny: Callable[..., Any]) -> None:
    """GPTQModel's `-:` patterns only repeat the information in the tensors."""
    path = save_tiny("Llama").path
    quantize(path, "gptq", unchanged="v_proj")
    set_quantization(path, dynamic={"-:.*v_proj": {}})
    assert load_model(path, torch.float32, CPU).config.num_layers == 2
