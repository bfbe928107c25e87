"""Weights of safetensors directories in FP8, AWQ or GPTQ, as `quantization_config` describes them.

The tensors decide which weights are quantised: a weight stored in a float type stays unchanged,
whatever exceptions the configuration lists. Activations are not quantised, so their scales are not
read; the scales of a KV cache are the loader's.

Sources of the layouts: transformers' `finegrained_fp8` and compressed-tensors' "float-quantized"
(weight = code · scale; scales of the tensor, of each row or of each block); AutoAWQ's GEMM kernels
(int32 words along the outputs, whose eight codes are in the order 0, 2, 4, 6, 1, 3, 5, 7);
AutoGPTQ and GPTQModel (words along the inputs; zero points along the outputs, less one in the first
version of the format; `g_idx` has the group of each input).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.errors import ModelError
from worker.models.fields import Fields
from worker.ops.cpu.native import Stored
from worker.ops.quantized import Encoding, GroupedWeight

_FP8 = "F8_E4M3"  # in the terms of safetensors
_METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
_FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors
# The place of each output's code among the eight of its word.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_PARTS = {
    "fp8": (*_SCALE_NAMES, "input_scale"),
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
}
# Scales of the operands of attention; those of the KV cache are the loader's.
_ATTENTION_SCALES = tuple(
    f".self_attn.{name}_scale" for name in ("q", "prob_output", "q_proj.output")
)
_BLOCK_ELEMENTS = 32  # of GGUF's Q4_0 and Q8_0
_Q4_0_ZERO = 8


@dataclass(frozen=True, slots=True)
class Quantization:
    """The encoding of a checkpoint's weights. `method` is "fp8", "awq" or "gptq".

    FP8: a `block` of (rows, columns) shares a scale; None: a row or the whole tensor does. The
    others: `group_size` columns share a scale (0: all), and zero points are the stored numbers plus
    `zero_offset`.
    """

    method: str
    bits: int = 8
    block: tuple[int, int] | None = None
    group_size: int = 0
    zero_offset: int = 0


def read_quantization(source: str, values: Mapping[str, Any]) -> Quantization | None:
    """Read the encoding from a `config.json`, if any. Raise `ModelError` for an unsupported one."""
    settings = values.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelError(f"{source}: quantization_config is not an object")
    fields = Fields(f"{source}: quantization_config", settings)
    method = _one_of(fields, "quant_method", _METHODS)
    if method == "fp8":
        _one_of(fields, "fmt", ("e4m3",), "e4m3")
        _one_of(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
        return Quantization("fp8", block=_block(fields, "weight_block_size"))
    if method == "compressed-tensors":
        return _compressed(fields)
    bits = fields.number("bits", int)
    allowed = (4,) if method == "awq" else (4, 8)
    if bits not in allowed:
        raise fields.refuse(f"bits {bits} is not supported, only {' and '.join(map(str, allowed))}")
    size = fields.number("group_size", int)
    if size < 1 and size != -1:
        raise fields.refuse(f"group_size {size} is neither above 0 nor -1")
    if method == "awq":
        _one_of(fields, "version", ("gemm",), "gemm")
        return Quantization("awq", bits, group_size=max(size, 0))
    version = _one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    overrides = fields.values.get("dynamic") or {}
    # "-:" marks patterns of modules that are not quantised.
    if not isinstance(overrides, dict) or not all(each.startswith("-:") for each in overrides):
        raise fields.refuse("dynamic has settings of its own for some modules: not supported")
    return Quantization("gptq", bits, None, max(size, 0), 1 if version == "gptq" else 0)


def _compressed(fields: Fields) -> Quantization:
    _one_of(fields, "format", _FORMATS)
    for key in ("sparsity_config", "transform_config"):
        value = fields.values.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise fields.refuse(f"{key} is not supported")
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.refuse("config_groups is missing, or not an object")
    blocks = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        settings = weights if isinstance(weights, dict) else {}
        own = Fields(f"{fields.source}: {name}: weights", settings)
        _one_of(own, "type", ("float",))
        if own.number("num_bits", int) != 8:
            raise own.refuse(f"num_bits {own.values['num_bits']} is not supported, only 8")
        strategy = _one_of(own, "strategy", ("tensor", "channel", "block"))
        blocks.append(_block(own, "block_structure") if strategy == "block" else None)
    if any(block != blocks[0] for block in blocks):
        raise fields.refuse("config_groups have blocks of different sizes: not supported")
    return Quantization("fp8", block=blocks[0])


def _one_of(fields: Fields, key: str, allowed: tuple[str, ...], default: str = "") -> str:
    value = fields.values.get(key) or default
    word = value.lower() if isinstance(value, str) else ""
    if word not in allowed:
        listed = ", ".join(allowed)
        raise fields.refuse(f"{key} is {value or 'missing'!r}; supported: {listed}")
    return word


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    size = fields.values.get(key)
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or any(type(n) is not int or n < 1 for n in size):
        raise fields.refuse(f"{key} is {size!r}, not two numbers above 0")
    return size[0], size[1]


class QuantizedTensors:
    """The quantised weights among the tensors of a checkpoint.

    `weights` has the shape [out, in] of each, by the name `….weight`; `others` are the names of the
    tensors that they consist of, and of tensors that are not read.
    """

    def __init__(
        self,
        source: str,
        quantization: Quantization,
        shapes: Mapping[str, tuple[int, ...]],
        types: Mapping[str, str],
        open_slice: Callable[[str], Any],
    ) -> None:
        self._source = source
        self._how = quantization
        self._shapes = shapes
        self._open = open_slice
        suffix, kind = (".weight", _FP8) if quantization.method == "fp8" else (".qweight", "I32")
        stems = [
            name.removesuffix(suffix)
            for name, shape in shapes.items()
            if name.endswith(suffix) and len(shape) == 2 and types[name] == kind
        ]
        self.weights = {f"{stem}.weight": self._shape(stem) for stem in stems}
        parts = {f"{stem}.{part}" for stem in stems for part in _PARTS[quantization.method]}
        # Scales of activations would otherwise count as unexpected tensors.
        self.others = {n for n in shapes if n in parts or n.endswith(_ATTENTION_SCALES)}
        for stem in stems:
            self._check(stem)

    @property
    def _per_word(self) -> int:
        return 32 // self._how.bits

    def _shape(self, stem: str) -> tuple[int, int]:
        if self._how.method == "fp8":
            out, inputs = self._shapes[f"{stem}.weight"]
            return out, inputs
        rows, columns = self._shapes[f"{stem}.qweight"]
        if self._how.method == "awq":
            return columns * self._per_word, rows
        return columns, rows * self._per_word

    def _scale_name(self, stem: str) -> str:
        names = [f"{stem}.{name}" for name in _SCALE_NAMES]
        return next((name for name in names if name in self._shapes), names[-1])

    def _check(self, stem: str) -> None:
        out, inputs = self.weights[f"{stem}.weight"]
        how = self._how
        if how.method == "fp8":
            allowed: list[tuple[int, ...]] = [(), (1,), (1, 1), (out,), (out, 1)]
            if how.block is not None:
                allowed = [(-(-out // how.block[0]), -(-inputs // how.block[1]))]
            self._expect(self._scale_name(stem), allowed)
            return
        groups = -(-inputs // how.group_size) if how.group_size else 1
        self._expect(f"{stem}.scales", [(groups, out)])
        self._expect(f"{stem}.qzeros", [(groups, -(-out // self._per_word))])
        if f"{stem}.g_idx" in self._shapes:
            self._expect(f"{stem}.g_idx", [(inputs,)])

    def _expect(self, name: str, allowed: list[tuple[int, ...]]) -> None:
        found = self._shapes.get(name)
        if found is None:
            raise ModelError(f"{self._source}: missing tensor {name}, of a quantised weight")
        if found not in allowed:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            raise ModelError(
                f"{self._source}: tensor {name} has shape {list(found)}, not {shapes}, which"
                " quantization_config asks for"
            )

    def read(self, name: str, rows: slice, columns: slice) -> GroupedWeight:
        """Read a part of a weight; both slices have a start and a stop. Raise `ModelError`."""
        stem = name.removesuffix(".weight")
        read = {"fp8": self._read_fp8, "awq": self._read_awq, "gptq": self._read_gptq}
        return read[self._how.method](stem, rows, columns)

    def _read_fp8(self, stem: str, rows: slice, columns: slice) -> GroupedWeight:
        codes = self._open(f"{stem}.weight")[rows, columns]
        name = self._scale_name(stem)
        stored = self._open(name)
        scales: Tensor = stored[...].float() if self._shapes[name] else stored[()].float()
        if self._how.block is not None:
            high, wide = self._how.block
            scales = scales[torch.arange(rows.start, rows.stop) // high]
            groups = torch.arange(columns.start, columns.stop) // wide
        else:
            scales = scales.reshape(-1, 1)
            each = scales.expand(len(codes), 1) if len(scales) == 1 else scales[rows]
            scales, groups = each, torch.zeros(codes.shape[1], dtype=torch.int64)
        return GroupedWeight(Encoding.FLOAT8, codes, scales, None, groups)

    def _read_awq(self, stem: str, rows: slice, columns: slice) -> GroupedWeight:
        # A part may begin within a word: read whole words and cut the codes.
        words, inner = _widened(rows, self._per_word)

        def unpacked(part: str, lines: slice) -> Tensor:
            values = _unpack(self._open(f"{stem}.{part}")[lines, words], self._how.bits)
            eights = values.view(len(values), -1, len(_AWQ_PLACES))[..., _AWQ_PLACES]
            return eights.reshape(len(values), -1)[:, inner].T

        every = slice(0, self._shapes[f"{stem}.scales"][0])
        return GroupedWeight(
            Encoding.UINT4,
            unpacked("qweight", columns),
            self._open(f"{stem}.scales")[every, rows].T,
            unpacked("qzeros", every),
            self._consecutive(columns),
        )

    def _read_gptq(self, stem: str, rows: slice, columns: slice) -> GroupedWeight:
        words, inner = _widened(columns, self._per_word)
        zero_words, zero_inner = _widened(rows, self._per_word)
        bits, offset = self._how.bits, self._how.zero_offset
        codes = _unpack(self._open(f"{stem}.qweight")[words, rows].T.contiguous(), bits)
        every = slice(0, self._shapes[f"{stem}.scales"][0])
        zeros = _unpack(self._open(f"{stem}.qzeros")[every, zero_words], bits)[:, zero_inner]
        groups, index = self._consecutive(columns), f"{stem}.g_idx"
        if index in self._shapes:
            groups = self._open(index)[columns].long()
            # An index out of range would read past the scales.
            if int(groups.min()) < 0 or int(groups.max()) >= every.stop:
                raise ModelError(
                    f"{self._source}: tensor {index} has groups beyond the {every.stop} with scales"
                )
        return GroupedWeight(
            Encoding.UINT4 if bits == 4 else Encoding.UINT8,
            codes[:, inner],
            self._open(f"{stem}.scales")[every, rows].T,
            # The first version stores zero points less one, so 0 as all ones.
            (zeros + offset & (1 << bits) - 1).T,
            groups,
        )

    def _consecutive(self, columns: slice) -> Tensor:
        """Return the groups of columns, if each consists of consecutive columns."""
        size = self._how.group_size or columns.stop
        return torch.arange(columns.start, columns.stop) // size


def _widened(part: slice, multiple: int) -> tuple[slice, slice]:
    first = part.start // multiple
    inner = slice(part.start - first * multiple, part.stop - first * multiple)
    return slice(first, -(-part.stop // multiple)), inner


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [n, m] to codes [n, m · 32 / bits] uint8, the lowest bits first."""
    values = words.contiguous().view(torch.uint8)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1)
    return values.reshape(len(words), -1)


def as_blocks(weight: GroupedWeight) -> Stored | None:
    """Re-encode a weight exactly in GGUF's blocks: Q4_0 for 4-bit codes whose zeros are all 8, else
    Q8_0. None where that is impossible: blocks would cross groups, a scale is not a float16 number,
    or codes minus zeros need more than eight bits.
    """
    rows, columns = weight.codes.shape
    if weight.zeros is None or columns % _BLOCK_ELEMENTS:
        return None
    groups = weight.groups.view(-1, _BLOCK_ELEMENTS)
    scales = weight.scales.to(torch.float16)
    is_exact = torch.equal(scales.float(), weight.scales.float())  # False for NaN too
    if not is_exact or not torch.equal(groups, groups[:, :1].expand_as(groups)):
        return None
    blocks = groups[:, 0]
    heads = scales[:, blocks].contiguous().view(torch.uint8).view(rows, -1, 2)
    codes = weight.codes.reshape(rows, -1, _BLOCK_ELEMENTS)
    name = "Q8_0"
    if weight.encoding is Encoding.UINT4 and bool((weight.zeros == _Q4_0_ZERO).all()):
        name, half = "Q4_0", _BLOCK_ELEMENTS // 2
        codes = codes[..., :half] | codes[..., half:] << 4
    else:
        wide = codes.to(torch.int16) - weight.zeros.to(torch.int16)[:, blocks].unsqueeze(-1)
        codes = wide.to(torch.int8)
        if not torch.equal(codes.to(torch.int16), wide):
            return None
        codes = codes.view(torch.uint8)
    data: np.ndarray[Any, np.dtype[np.uint8]] = torch.cat((heads, codes), dim=-1).numpy()
    return Stored(name, rows, columns, data.reshape(-1))
