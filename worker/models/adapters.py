"""LoRA adapters (Hu et al., arXiv:2106.09685) as PEFT writes them.

Settings that ask for more than a product of two matrices are refused by name, as are tensors for
which the model has no place.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.errors import ModelError
from worker.models.config import ModelConfig
from worker.models.loader import expected_shapes, shard_config, shard_places
from worker.models.names import row_order
from worker.ops.lora import Factors, Product
from worker.ops.parallel import WHOLE, Shard

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# The modules that each product of a layer fuses.
_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# The modules that are fused in checkpoints already, and so in adapters, and the architectures.
_FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_FUSES = ("phi3",)
TARGETS = tuple(
    name.rpartition(".")[2] for names in (*_PARTS.values(), _FUSED.values()) for name in names
)
# Fields of PEFT's LoraConfig for unsupported features, and the values that leave them off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_qalora": (False,),
}
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


class _Settings(msgspec.Struct):
    r: int
    lora_alpha: float
    use_rslora: bool = False
    target_modules: list[str] | str | None = None

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def layer_products(config: ModelConfig) -> list[dict[str, Product]]:
    shapes = expected_shapes(config)
    layers = []
    for index in range(config.num_layers):
        found = {
            product: [shapes.get(f"model.layers.{index}.{name}.weight") for name in names]
            for product, names in _PARTS.items()
        }
        layers.append(
            {
                product: Product(tuple(s[0] for s in sizes if s), sizes[0][1])
                for product, sizes in found.items()
                if sizes[0] is not None
            }
        )
    return layers


def read_adapter(
    path: str, config: ModelConfig, max_rank: int, shard: Shard = WHOLE
) -> list[dict[str, Factors]]:
    """Read an adapter's factors for the products of each layer of a shard of the model: float32, on
    the CPU. Raise `ModelError`, for every shard, before any weight is read unless the disk fails.
    """
    folder = Path(path)
    settings = _settings(folder / CONFIG_NAME, max_rank)
    layers = layer_products(config)
    source = folder / WEIGHTS_NAME
    try:
        with safe_open(source, framework="pt") as file:
            # Shapes come from the header alone: a wrong adapter is refused before its data is read.
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
            names = _checked(source, stored, _places(config, layers), settings.r)
            read = {side: file.get_tensor(name)[rows] for side, (name, rows) in names.items()}
    except FileNotFoundError:
        raise ModelError(f"there is no file {source}") from None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{source}: {error}") from error
    weights = {side: _ordered(side, tensor, config) for side, tensor in read.items()}
    for (name, side), tensor in weights.items():
        if side == "B":
            # Scaling B once here saves a multiplication in every step.
            tensor.mul_(settings.scale)
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{source}: the numbers of {name} are not all finite")
    if shard.size > 1:
        places, layers = shard_places(config, shard), layer_products(shard_config(config, shard))
        for (name, side), tensor in weights.items():
            rows, columns = places[name]
            # A copy, so that the other shards' parts take no memory.
            weights[name, side] = (tensor[:, columns] if side == "A" else tensor[rows]).clone()
    return [
        _layer(f"model.layers.{index}.", products, weights) for index, products in enumerate(layers)
    ]


class _Place(NamedTuple):
    """A stored module: its inputs, and the rows that belong to each module of the model."""

    inputs: int
    rows: dict[str, slice]


def _places(config: ModelConfig, layers: Sequence[Mapping[str, Product]]) -> dict[str, _Place]:
    places = {}
    for index, products in enumerate(layers):
        for key, product in products.items():
            prefix, start, rows = f"model.layers.{index}.", 0, {}
            for name, size in zip(_PARTS[key], product.sizes, strict=True):
                places[prefix + name] = _Place(product.inputs, {prefix + name: slice(size)})
                rows[prefix + name] = slice(start, start + size)
                start += size
            if key in _FUSED and config.architecture in _FUSES:
                places[prefix + _FUSED[key]] = _Place(product.inputs, rows)
    return places


def _settings(path: Path, max_rank: int) -> _Settings:
    try:
        content = path.read_bytes()
        given = msgspec.json.decode(content, type=dict[str, Any])
        settings = msgspec.convert(given, _Settings)
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: {error}") from error
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        # A field that PEFT adds later is unknown here and accepted; only known changes are refused.
        if value is not None and value not in neutral:
            raise ModelError(f"{path}: {name} {value!r} is not supported")
    targets = settings.target_modules
    # PEFT reads a string as a pattern: then the names of the tensors decide.
    for target in targets if isinstance(targets, list) else ():
        if target.rpartition(".")[2] not in TARGETS:
            raise ModelError(
                f"{path}: target_modules has {target!r}; adapters of {', '.join(TARGETS)} are"
                " supported"
            )
    if not 1 <= settings.r <= max_rank:
        raise ModelError(
            f"{path}: rank {settings.r} is not in [1, {max_rank}]: --max-lora-rank raises the limit"
        )
    return settings


_Side = tuple[str, str]  # a module of the model, and "A" or "B"


def _checked(
    source: Path, stored: Mapping[str, tuple[int, ...]], places: Mapping[str, _Place], rank: int
) -> dict[_Side, tuple[str, slice]]:
    """Return the stored names of each module's two weights, and its rows in them. Raise
    `ModelError`.
    """
    names: dict[_Side, tuple[str, slice]] = {}
    for name, shape in stored.items():
        if ".experts." in name:
            raise ModelError(f"{source}: {name} adapts experts, which is not supported")
        match = _NAME.fullmatch(name)
        place = places.get(match[1]) if match else None
        if match is None or place is None:
            raise ModelError(f"{source}: the model has no place for tensor {name}")
        side, size = match[2], max(rows.stop for rows in place.rows.values())
        wanted = (rank, place.inputs) if side == "A" else (size, rank)
        if shape != wanted:
            raise ModelError(f"{source}: tensor {name} has shape {list(shape)}, not {list(wanted)}")
        for module, rows in place.rows.items():
            names[module, side] = name, slice(rank) if side == "A" else rows
    for module, side in names:
        if (module, "A" if side == "B" else "B") not in names:
            raise ModelError(f"{source}: {module} has lora_{side} alone")
    if not names:
        raise ModelError(f"{source}: there are no tensors")
    return names


def _ordered(side: _Side, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return a weight as float32, its outputs in the order of the model's."""
    order = row_order(f"{side[0]}.weight", config, len(tensor)) if side[1] == "B" else None
    return (tensor if order is None else tensor[order]).to(torch.float32, copy=True)


def _layer(
    prefix: str, products: Mapping[str, Product], weights: Mapping[_Side, Tensor]
) -> dict[str, Factors]:
    adapted = {}
    for product, shape in products.items():
        modules = [f"{prefix}{name}" for name in _PARTS[product]]
        parts: Sequence[tuple[Tensor, Tensor] | None] = [
            (weights[module, "A"], weights[module, "B"]) if (module, "A") in weights else None
            for module in modules
        ]
        if any(part is not None for part in parts):
            adapted[product] = Factors(shape, tuple(parts))
    return adapted
