"""Load a model from a `WeightFile`: every tensor is read once, directly into its final memory.

A missing, unexpected or misshapen tensor is a `ModelError` before any weight is read.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from worker.errors import ConfigError, ModelError
from worker.models.checkpoints import WeightFile, open_checkpoint, read
from worker.models.config import GEMMA, ModelConfig
from worker.models.llama import LayerWeights, LlamaModel, layer_shape, native_layers
from worker.models.names import ROUTER
from worker.models.rotary import RopeScaling
from worker.ops.cpu.native import CpuKernels, Stored, stored
from worker.ops.experts import Experts
from worker.ops.linear import DenseLinear, Linear, can_pack, make_linear
from worker.ops.parallel import (
    WHOLE,
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
    VocabParallelLinear,
)
from worker.ops.planes import BlockWeight, PlanesLinear, PlaneWeight, choose_planes
from worker.ops.planes import pack as pack_blocks
from worker.ops.quantized import GroupedWeight, QuantizedLinear, choose_product, pack
from worker.ops.rope import RopeTable, make_rope_table

logger = logging.getLogger(__name__)

# Buffers that some exporters store although they follow from the configuration.
_DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
# Names of the scales that divide keys and values in an 8-bit cache, by exporter.
_KV_SCALES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale")
_KV_SCALE = re.compile(r"\.self_attn\.((attn\.|[qkv]_proj\.)?[qkv]|[qkv]_proj\.output)_scale$")
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING, _FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
_HEAD = "lm_head.weight"
_KV_PARTS = frozenset({"self_attn.k_proj", "self_attn.v_proj"})
_NAMES_LISTED = 5
# Layers read at a time; each briefly needs twice the memory of its largest product.
_MAX_READERS = 4


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    check: Callable[[ModelConfig], object] | None = None,
    kernels: CpuKernels | None = None,
    quantization: str = "none",
    shard: Shard = WHOLE,
) -> LlamaModel:
    """Load a GGUF file or a safetensors directory; raise `ModelError` that explains what is wrong.

    `check` gets the model's shape before any weight is read, and may raise. With `kernels` and a
    `dtype` of float32, weights stay as stored and layers are native; `quantization` converts the
    weights of products whose rows are whole blocks, and raises `ConfigError` where the kernels do
    not support the model. A `shard` has only its own parts and the whole embedding, and its layers
    are not native, as ranks meet within a layer.
    """
    checkpoint = open_checkpoint(Path(path), quantization)
    _check_tensors(checkpoint)
    config = shard_config(checkpoint.config, shard)
    if check is not None:
        check(config)
    # Torch's layers serve the shapes that the native kernels lack.
    if not layer_shape(checkpoint.config).is_supported:
        kernels = None
    if quantization != "none" and kernels is None:
        raise ConfigError(
            f"--quantization {quantization}: no native kernels for the layers of {path}: leave the"
            " flag out"
        )
    return _Assembly(checkpoint, config, dtype, device, kernels, shard).model(max_positions)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of a shard's layers. Raise `ConfigError` for an uneven division."""
    inner = _inner_sizes(config)
    counts = (config.num_heads, config.num_kv_heads, *inner.values())
    if not _splits(counts, shard.size):
        possible = [str(n) for n in range(1, config.num_heads + 1) if _splits(counts, n)]
        sizes = " and ".join(f"{name} {size}" for name, size in inner.items())
        raise ConfigError(
            f"--tensor-parallel-size {shard.size} does not divide the model's {counts[0]} heads,"
            f" {counts[1]} KV heads and {sizes}: choose"
            f" {' or '.join(filter(None, [', '.join(possible[:-1]), possible[-1]]))}"
        )
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=max(1, config.num_kv_heads // shard.size),
        intermediate_size=config.intermediate_size // shard.size,
        expert_size=config.expert_size // shard.size,
    )


def _inner_sizes(config: ModelConfig) -> dict[str, int]:
    has_experts = {config.has_experts(index) for index in range(config.num_layers)}
    sizes = {"intermediate size": config.intermediate_size} if False in has_experts else {}
    return sizes | ({"expert size": config.expert_size} if True in has_experts else {})


def _splits(counts: Sequence[int], size: int) -> bool:
    """Return True if all divide evenly among `size` shards; several shards may share a KV head."""
    heads, kv_heads, *inner = counts
    is_even = all(count % size == 0 for count in (heads, *inner))
    return is_even and min(kv_heads % size, size % kv_heads) == 0


def _check_tensors(checkpoint: WeightFile) -> None:
    found, num_layers = checkpoint.shapes(), checkpoint.config.num_layers
    if num_layers > len(found):  # `expected_shapes` would not end for a hostile number of layers
        raise ModelError(
            f"{checkpoint.source}: there are {len(found)} tensors, too few for {num_layers} layers"
        )
    wanted = expected_shapes(checkpoint.config)
    optional: dict[str, tuple[int, ...]] = {_ROPE_FACTORS: (_rotary_pairs(checkpoint.config),)}
    if checkpoint.config.tied_head:  # some exporters store the tied copy as well
        optional[_HEAD] = wanted[_EMBEDDING]
    known = wanted | {name: shape for name, shape in optional.items() if name in found}
    unread = [n for n in found if _DERIVED.search(n) or _KV_SCALE.search(n)]
    surplus = [n for n in found if n not in known and n not in unread]
    problems = [
        ("missing tensors: ", [checkpoint.stored_name(n) for n in known if n not in found]),
        ("unexpected tensors: ", [checkpoint.stored_name(n) for n in surplus]),
        (
            "",
            [
                f"tensor {checkpoint.stored_name(name)} has shape {list(found[name])},"
                f" not {list(shape)}"
                for name, shape in known.items()
                if name in found and found[name] != shape
            ],
        ),
    ]
    reasons = [label + _some(names) for label, names in problems if names]
    if reasons:
        raise ModelError(f"{checkpoint.source}: {'; '.join(reasons)}")


def _some(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))  # parts of a fused tensor have one name
    more = len(listed) - _NAMES_LISTED
    return ", ".join(listed[:_NAMES_LISTED]) + (f" and {more} more" if more > 0 else "")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: table, _FINAL_NORM: (config.hidden_size,)}
    if not config.tied_head:
        shapes[_HEAD] = table
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for norm, size in _norms(config).items():
            shapes[f"{prefix}{norm}.weight"] = (size,)
        for part in _projections(config, index).values():
            for name, size in part.outputs.items():
                shapes[f"{prefix}{name}.weight"] = (size, part.inputs)
                if part.bias:
                    shapes[f"{prefix}{name}.bias"] = (size,)
    return shapes


def _norms(config: ModelConfig) -> dict[str, int]:
    names = {"input_layernorm", "post_attention_layernorm", _mlp_norm(config)}
    if config.post_norms:
        names.add("post_feedforward_layernorm")
    sizes = dict.fromkeys(sorted(names), config.hidden_size)
    if config.qk_norm:
        sizes |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    return sizes


def _mlp_norm(config: ModelConfig) -> str:
    """Return the name of the norm before the MLP; without `post_norms` it mentions attention."""
    return "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"


class _Projection(NamedTuple):
    """Fused linear parts with one input; shards split outputs or, if `splits_inputs`, inputs. The
    parts of sums over inputs are added up here, unless a mixture of experts does (`is_mixed`).
    """

    outputs: dict[str, int]
    inputs: int
    bias: bool
    splits_inputs: bool = False
    is_mixed: bool = False


def _projections(config: ModelConfig, index: int) -> dict[str, _Projection]:
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    qkv = {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    products = {
        "qkv": _Projection(qkv, hidden, config.qkv_bias),
        "output": _Projection(
            {"self_attn.o_proj": hidden}, query_size, config.output_bias, splits_inputs=True
        ),
    }

    def add_mlp(name: str, inner: int, suffix: str = "", is_mixed: bool = False) -> None:
        gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        products[f"gate_up{suffix}"] = _Projection(gate_up, hidden, config.mlp_bias)
        down = {f"{name}.down_proj": hidden}
        products[f"down{suffix}"] = _Projection(down, inner, config.mlp_bias, True, is_mixed)

    if not config.has_experts(index):
        add_mlp("mlp", config.intermediate_size)
        return products
    products["router"] = _Projection({ROUTER: config.num_experts}, hidden, False)
    for expert in range(config.num_experts):
        add_mlp(f"mlp.experts.{expert}", config.expert_size, f".{expert}", is_mixed=True)
    return products


def _shard_places(
    part: _Projection, shard: Shard, num_kv_heads: int
) -> dict[str, tuple[slice, slice]]:
    rank, places = shard.rank, {}
    # With more ranks than KV heads, consecutive ranks share a head.
    sharing = max(1, shard.size // num_kv_heads)
    for name, count in part.outputs.items():
        own = rank // sharing if name in _KV_PARTS else rank
        own = 0 if name == ROUTER else own  # every rank chooses the experts of all rows
        row, column = (0, rank * part.inputs) if part.splits_inputs else (own * count, 0)
        places[name] = slice(row, row + count), slice(column, column + part.inputs)
    return places


def shard_places(config: ModelConfig, shard: Shard) -> dict[str, tuple[slice, slice]]:
    """Return the rows and columns of a shard in the weight of each product of the layers."""
    own = shard_config(config, shard)
    return {
        f"model.layers.{index}.{name}": place
        for index in range(config.num_layers)
        for part in _projections(own, index).values()
        for name, place in _shard_places(part, shard, config.num_kv_heads).items()
    }


class _Assembly:
    """Builds the model from a checked checkpoint, one product at a time."""

    def __init__(
        self,
        checkpoint: WeightFile,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None,
        shard: Shard,
    ) -> None:
        self._kernels = kernels
        self._checkpoint = checkpoint
        self._config = config
        self._shard = shard
        # With more ranks than KV heads, consecutive ranks share a head.
        self._sharing = max(1, shard.size // checkpoint.config.num_kv_heads)
        self._dtype = dtype
        self._device = device
        self._product = choose_product(device) if checkpoint.is_grouped else None
        self._planes = choose_planes(device) if checkpoint.is_in_blocks else None
        self._decoded: list[str] = []  # products that packed weights do not fit

    def model(self, max_positions: int | None) -> LlamaModel:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        embedding, head = self._tables(table)
        # Decoding takes most of a start, and layers are independent of each other.
        with ThreadPoolExecutor(min(_MAX_READERS, torch.get_num_threads())) as readers:
            layers = tuple(readers.map(self._layer, range(config.num_layers)))
        if self._decoded:
            logger.warning(
                "%s: quantised weights without a kernel on this device are decoded: %s",
                self._checkpoint.source,
                _some(sorted(self._decoded)),
            )
        final_norm = self._norm(_FINAL_NORM, config.hidden_size)
        factors = None
        if _ROPE_FACTORS in self._checkpoint.shapes():
            factors = torch.empty(_rotary_pairs(config))
            self._checkpoint.read_into(_ROPE_FACTORS, factors)
        length = min(config.max_context, max_positions or config.max_context)
        rope = model_rope_table(config, length, self._device, factors)
        local_rope = None
        if config.local_rope_theta:
            local = dataclasses.replace(
                config, rope_theta=config.local_rope_theta, rope_scaling=None
            )
            local_rope = model_rope_table(local, length, self._device)
        return LlamaModel(
            *(config, embedding, layers, final_norm, head, rope),
            *(self._dtype, self._device, self._kernels),
            native_layers(layers, config) if self._kernels is not None else None,
            local_rope=local_rope,
        )

    def _tables(self, shape: tuple[int, int]) -> tuple[Linear, Linear]:
        # Every rank embeds all tokens itself, which saves a transfer, and has a part of the head.
        weight, every = None, slice(0, shape[0])
        embedding = self._stored_table(_EMBEDDING, every, shape[1])
        if embedding is None:
            weight = self._read(_EMBEDDING, shape)
            # Reading by rows takes the plain layout.
            embedding = DenseLinear(weight) if self._kernels is None else self._made(weight)
        if self._shard.size > 1:
            return embedding, self._vocab_parallel_head(shape, embedding)
        if not self._config.tied_head:
            head = self._stored_table(_HEAD, every, shape[1])
            return embedding, head or self._made(self._read(_HEAD, shape))
        if weight is None or self._kernels is not None:
            return embedding, embedding
        return embedding, self._made(weight)

    def _made(self, weight: Tensor) -> Linear:
        return make_linear(weight, kernels=self._kernels)

    def _stored_table(
        self, name: str, rows: slice, columns: int, num_rows: int | None = None
    ) -> Linear | None:
        """Return rows of a table as they are stored. None: they have to be decoded."""
        places = {name: (rows, slice(0, columns))}
        native = self._native(places, num_rows=num_rows)
        has_planes = self._planes is not None and rows.start < rows.stop
        return self._packed(places) if native is None and has_planes else native

    def _vocab_parallel_head(self, shape: tuple[int, int], embedding: Linear) -> Linear:
        vocab_size, hidden = shape
        size = -(-vocab_size // self._shard.size)
        start = min(self._shard.rank * size, vocab_size)
        rows = slice(start, min(start + size, vocab_size))
        tied = embedding if self._config.tied_head else None
        name = _HEAD if tied is None else _EMBEDDING
        # All ranks have equal sizes; the last one is padded.
        if isinstance(tied, PlanesLinear) and start < vocab_size:
            linear: Linear | None = tied.part(rows.start, rows.stop)
        else:
            linear = self._stored_table(name, rows, hidden, size)
        if linear is None:
            if isinstance(tied, DenseLinear) and rows.stop - start == size:
                weight = tied.weight[rows]
            else:
                weight = torch.zeros((size, hidden), dtype=self._dtype, device=self._device)
                self._checkpoint.read_into(name, weight[: rows.stop - start], start)
            linear = make_linear(weight, kernels=self._kernels)
        return VocabParallelLinear(linear, size, vocab_size, self._shard)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        projections = _projections(config, index)
        stacks, own = self._stacks(prefix, projections) if config.has_experts(index) else ([], {})
        parts = {
            name: self._linear(prefix, part, own.get(name)) for name, part in projections.items()
        }
        experts = self._experts(parts, stacks) if config.has_experts(index) else None
        norms = {
            name: self._norm(f"{prefix}{name}.weight", size)
            for name, size in _norms(config).items()
        }
        return LayerWeights(
            input_norm=norms["input_layernorm"],
            qkv=parts["qkv"],
            output=parts["output"],
            mlp_norm=norms[_mlp_norm(config)],
            gate_up=parts["gate_up"] if experts is None else experts.gate_up[0],
            down=parts["down"] if experts is None else experts.down[0],
            query_norm=norms.get("self_attn.q_norm"),
            key_norm=norms.get("self_attn.k_norm"),
            rotates=index not in config.no_rope_layers,
            window=config.window_of(index),
            attention_norm=norms["post_attention_layernorm"] if config.post_norms else None,
            branch_norm=norms.get("post_feedforward_layernorm"),
            experts=experts,
            kv_scales=self._kv_scales(f"{prefix}self_attn."),
        )

    def _kv_scales(self, prefix: str) -> Tensor | None:
        """Return the scales of the shard's KV heads [2, kv_heads]; None if none are stored."""
        heads, names = self._config.num_kv_heads, self._checkpoint.shapes()
        sizes = (1, self._checkpoint.config.num_kv_heads)
        scales = torch.ones(2, heads)
        found = False
        for row, part in zip(scales, "kv", strict=True):
            for name in (prefix + form.format(part, part) for form in _KV_SCALES):
                if name not in names:
                    continue
                stored = read(self._checkpoint, name)
                if len(stored) not in sizes or not (stored > 0).all():
                    raise ModelError(
                        f"{self._checkpoint.source}: tensor {name} must be a positive number, or"
                        " one for each KV head"
                    )
                if len(stored) > 1:
                    stored = stored[self._shard.rank // self._sharing * heads :][:heads]
                row.copy_(stored)
                found = True
        return scales.to(self._device) if found else None

    def _stacks(
        self, prefix: str, projections: Mapping[str, _Projection]
    ) -> tuple[list[Tensor | PlaneWeight], dict[str, Tensor | PlanesLinear]]:
        """Pack the weights of a layer's experts together, or allocate memory for them; return the
        stacks, and each expert's part. Products with a layout of their own are left out.
        """
        has_layout = self._device.type == "cpu" and can_pack(self._dtype)
        stacks: list[Tensor | PlaneWeight] = []
        own: dict[str, Tensor | PlanesLinear] = {}
        for kind in ("gate_up", "down"):
            parts = {name: part for name, part in projections.items() if kind in name}
            places = [
                each for part in parts.values() for each in self._weights(prefix, part).items()
            ]
            packed = self._packed(dict(places), is_stacked=True)
            if isinstance(packed, PlanesLinear):
                stack = packed.weights[0]
                rows = stack.outputs // len(parts)
                stacks.append(stack)
                own |= {
                    name: packed.part(n * rows, n * rows + rows) for n, name in enumerate(parts)
                }
            elif self._kernels is None and not has_layout:
                one = next(iter(parts.values()))
                dense = self._empty((len(parts), sum(one.outputs.values()), one.inputs))
                stacks.append(dense)
                own |= zip(parts, dense, strict=True)
        return stacks, own

    def _experts(
        self, parts: Mapping[str, Linear], stacks: Sequence[Tensor | PlaneWeight]
    ) -> Experts:
        config = self._config
        numbers = range(config.num_experts)
        return Experts(
            router=parts["router"],
            gate_up=tuple(parts[f"gate_up.{n}"] for n in numbers),
            down=tuple(parts[f"down.{n}"] for n in numbers),
            per_token=config.experts_per_token,
            normalized=config.normalizes_experts,
            stacks=(stacks[0], stacks[1]) if len(stacks) == 2 else None,
            is_split=self._shard.size > 1,
        )

    def _linear(
        self, prefix: str, part: _Projection, own: Tensor | PlanesLinear | None = None
    ) -> Linear:
        """Return the fused product of stacked parts: its `own`, or with its `own` memory, to which
        the weight is decoded.
        """
        bias = None
        if part.bias and not (part.splits_inputs and self._shard.rank > 0):  # rank 0 alone adds it
            bias = self._joined(prefix, "bias", part)
        linear: Linear | None = own if isinstance(own, PlanesLinear) else None
        if own is None:
            places = self._weights(prefix, part)
            linear = self._native(places, bias) or self._packed(places, bias)
        if linear is None:
            memory = own if isinstance(own, Tensor) else None
            linear = make_linear(self._joined(prefix, "weight", part, memory), bias, self._kernels)
        if self._shard.size > 1 and part.splits_inputs:
            return RowParallelLinear(linear, self._shard, part.is_mixed)
        if self._shard.size > 1 and _KV_PARTS & part.outputs.keys():
            return ColumnParallelLinear(linear, self._owned(part).to(self._device))
        return linear

    def _owned(self, part: _Projection) -> Tensor:
        """Return the place of each of the rank's outputs among those of the whole product."""
        found, start = [], 0
        for name, (rows, _) in self._places(part).items():
            sharing = self._sharing if name in _KV_PARTS else 1
            own = torch.arange(rows.start, rows.stop) + start
            found.append(torch.full_like(own, -1) if self._shard.rank % sharing else own)
            start += part.outputs[name] * self._shard.size // sharing
        return torch.cat(found)

    def _native(
        self,
        places: Mapping[str, tuple[slice, slice]],
        bias: Tensor | None = None,
        num_rows: int | None = None,
    ) -> Linear | None:
        """Return the product of parts of weights as stored, with rows of zeros up to `num_rows`.
        None: no kernels, or a weight needs decoding.
        """
        if self._kernels is None:
            return None
        parts = []
        for name, place in places.items():
            whole = self._checkpoint.stored(name)
            part = None if whole is None else whole.part(*place, num_rows)
            if whole is not None and part is None:
                part = _decoded_part(self._kernels, whole, *place)
            if part is not None:
                parts.append(part)
        return self._kernels.linear(parts, bias) if len(parts) == len(places) else None

    def _packed(
        self,
        places: Mapping[str, tuple[slice, slice]],
        bias: Tensor | None = None,
        is_stacked: bool = False,
    ) -> Linear | None:
        """Return the product of parts of weights that stay quantised. None: a weight is not
        quantised, or has to be decoded, as on a CPU, and in a stack of experts unless all are
        blocks of one encoding.
        """
        if self._kernels is not None or (self._product is None and self._planes is None):
            return None
        found: list[GroupedWeight | BlockWeight] = []
        for name, (rows, columns) in places.items():
            if is_stacked and self._planes is None:  # one row shows whether it is quantised
                rows = slice(rows.start, rows.start + 1)
            weight = self._checkpoint.grouped(name, rows, columns)
            if weight is None:
                return None
            found.append(weight)
        linear = self._quantized(found, bias)
        is_one = isinstance(linear, PlanesLinear) and len(linear.weights) == 1
        if linear is None or (is_stacked and not is_one):
            self._decoded.append(next(iter(places)).removesuffix(".weight"))
            return None
        return linear

    def _quantized(
        self, found: Sequence[GroupedWeight | BlockWeight], bias: Tensor | None
    ) -> Linear | None:
        if self._planes is not None:
            blocks = [weight for weight in found if isinstance(weight, BlockWeight)]
            planes = pack_blocks(blocks, self._device)
            return None if planes is None else PlanesLinear(planes, bias, self._planes, self._dtype)
        packed = pack([w for w in found if isinstance(w, GroupedWeight)], self._device)
        if packed is None or self._product is None:
            return None
        return QuantizedLinear(packed, bias, self._product)

    def _weights(self, prefix: str, part: _Projection) -> dict[str, tuple[slice, slice]]:
        return {f"{prefix}{name}.weight": place for name, place in self._places(part).items()}

    def _places(self, part: _Projection) -> dict[str, tuple[slice, slice]]:
        return _shard_places(part, self._shard, self._checkpoint.config.num_kv_heads)

    def _joined(
        self, prefix: str, kind: str, part: _Projection, into: Tensor | None = None
    ) -> Tensor:
        size = sum(part.outputs.values())
        shape = (size, part.inputs) if kind == "weight" else (size,)
        joined, start = self._empty(shape) if into is None else into, 0
        for name, (rows, columns) in self._places(part).items():
            destination = joined[start : start + part.outputs[name]]
            place = rows.start, columns.start
            self._checkpoint.read_into(f"{prefix}{name}.{kind}", destination, *place)
            start += len(destination)
        return joined

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._empty(shape)
        self._checkpoint.read_into(name, tensor)
        return tensor

    def _norm(self, name: str, size: int) -> Tensor:
        # Gemma multiplies by 1 + weight; the sum needs more precision than the stored weight.
        is_added = self._config.architecture in GEMMA
        dtype = torch.float32 if is_added else self._dtype
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        self._checkpoint.read_into(name, tensor)
        return tensor

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _decoded_part(kernels: CpuKernels, whole: Stored, rows: slice, columns: slice) -> Stored | None:
    """Return a part whose blocks are cut: the same numbers in float32. None: not for kernels."""
    linear = kernels.linear([whole])
    if linear is None:
        return None
    return stored(linear.rows(torch.arange(rows.start, rows.stop))[:, columns])


def model_rope_table(
    config: ModelConfig, length: int, device: torch.device, factors: Tensor | None = None
) -> RopeTable:
    """Compute cos and sin of positions 0 to length-1 on a device."""
    frequencies = inverse_frequencies(config, factors, length)
    still = config.head_dim // 2 - len(frequencies)  # pairs that are not rotated
    table = make_rope_table(functional.pad(frequencies, (0, still)).to(device), length)
    scaling = config.rope_scaling
    if scaling is None or scaling.attention_factor == 1.0:
        return table
    stretch = torch.full_like(frequencies, scaling.attention_factor)
    stretch = functional.pad(stretch, (0, still), value=1.0).repeat(2).to(device)
    return RopeTable(table.cos * stretch, table.sin * stretch)


def _rotary_pairs(config: ModelConfig) -> int:
    return (config.rotary_dim or config.head_dim) // 2


def inverse_frequencies(
    config: ModelConfig, factors: Tensor | None = None, length: int = 0
) -> Tensor:
    """Return rotary inverse frequencies [rotary_dim / 2], float32, scaled as configured.

    `factors` [rotary_dim / 2] divide them (GGUF's form of Llama 3's scaling). Dynamic scaling has
    one base for all positions, that of a sequence as long as the model's context; longrope one set
    of factors, the long ones if sequences may have a `length` beyond the original context.
    """
    scaling, pairs = config.rope_scaling, _rotary_pairs(config)
    base = config.rope_theta
    if scaling is not None and scaling.kind == "dynamic":
        # transformers changes the base beyond the original context, where no sequence gets here.
        base = _dynamic_base(base, 2 * pairs, scaling, config.max_context)
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.int64).float() / (2 * pairs)
    frequencies = 1.0 / (base**exponents)
    if factors is not None:
        frequencies = frequencies / factors
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn_frequencies(frequencies, base, scaling)
    if scaling.kind == "longrope":
        is_long = length > scaling.original_context
        own = scaling.long_factors if is_long else scaling.short_factors
        if len(own) != pairs:
            raise ModelError(f"longrope has {len(own)} factors for {pairs} rotary frequencies")
        return 1.0 / (torch.tensor(own) * base**exponents)
    return _llama3_frequencies(frequencies, scaling)


def _dynamic_base(base: float, head_dim: int, scaling: RopeScaling, context: int) -> float:
    stretch = max(context, scaling.original_context) / scaling.original_context
    grown = scaling.factor * stretch - (scaling.factor - 1)
    return float(base * grown ** (head_dim / (head_dim - 2))) if head_dim > 2 else base


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale like Llama 3.1: long wavelengths by `factor`, short ones not, with a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unscaled = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled) * frequencies / scaling.factor + unscaled * frequencies


def _yarn_frequencies(frequencies: Tensor, base: float, scaling: RopeScaling) -> Tensor:
    """Scale like YaRN: pairs that turn often over the original context keep their frequency, those
    that turn rarely are divided by `factor`, with a ramp over the pair's index between.
    """
    pairs = len(frequencies)

    def pair_turning(turns: float) -> float:
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(base)

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        # As in transformers: a ramp without width would divide by zero.
        high += 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
