"""EAGLE heads as they are published: a directory with config.json and model.safetensors.

EAGLE-1 (Li et al., arXiv:2401.15077): `fc` fuses the embedding of token p + 1 with the target's
state of position p, after its final norm. One llama layer without a norm before its attention makes
the state of position p + 1, and the target's own output rows turn that into logits.

EAGLE-3 (arXiv:2503.01840): `fc` reduces the states that enter some of the target's layers to one of
the head's size. Queries, keys and values read the embedding beside that state, each normalised. The
head has a final norm, and output rows of its own: row i belongs to token i + d2t[i].

Both draft on from their own states; those of EAGLE-3 skip `fc`.

Sources of names and formulas: github.com/SafeAILab/EAGLE (`cnets1.py` and `cnets.py`), SpecForge,
and vLLM's speculators, which nest the layer's fields in `transformer_layer_config`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.errors import ModelError
from worker.models.config import ModelConfig, from_hf
from worker.models.fields import Fields, read_json
from worker.models.llama import (
    LayerWeights,
    LlamaModel,
    StepTensors,
    attention_block,
    attention_shape,
    mlp_block,
)
from worker.models.loader import model_rope_table
from worker.ops.backends import rms_norm
from worker.ops.linear import DenseLinear, Linear, make_linear, make_rounded_linear
from worker.ops.rope import RopeTable

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_CHUNK_ROWS = 4096

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Weights of a head on its target's device and in its dtype. Holds no state between steps.

    `layers` are the target's whose inputs `fuse` reduces. The norms exist in EAGLE-3 only, that of
    the states here if the layer adds its outputs to the normalised state, else in the layer.
    `draft_vocab` [Vd] int64 maps the columns of `logits` to the target's ids.
    """

    config: ModelConfig
    target: LlamaModel
    layers: tuple[int, ...]
    draft_vocab: Tensor | None
    embedding: Linear
    fuse: Linear
    word_norm: Tensor | None
    state_norm: Tensor | None
    layer: LayerWeights
    output_norm: Tensor | None
    head: Linear
    rope: RopeTable

    def reduce(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return self.fuse(torch.cat([*inputs], dim=-1)) if inputs else self.target.normed(states)

    def forward(self, features: Tensor, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Return the head's states [T, H] of every row, as `DraftHead.forward` does. `features`
        [T, H] are those of `reduce`, or this method's results, for the position before.
        """
        words = self.embedding.rows(step.token_ids)
        config, backend = self.config, self.target.backend
        if self.word_norm is None:
            x, beside = self.fuse(torch.cat((words, features), dim=-1)), None
        else:
            x, beside = features, rms_norm(words, self.word_norm, config.rms_norm_eps)
        if self.state_norm is not None:
            x = rms_norm(x, self.state_norm, config.rms_norm_eps)
        attention = backend.plan(step, attention_shape(config, kv_cache), self.rope)
        place = (self.layer, config, kv_cache[0], attention, backend)
        return mlp_block(attention_block(x, *place, beside=beside), self.layer, config, backend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, Vd] float32 of states [R, H]."""
        if self.output_norm is not None:
            hidden = rms_norm(hidden, self.output_norm, self.config.rms_norm_eps)
        return self.head(hidden).float()


def load_eagle_head(
    path: Path, target: LlamaModel, method: str, *, is_rounded: bool = False
) -> EagleHead:
    """Load a head of `method` "eagle" or "eagle3", or raise `ModelError` that names file and field.
    `is_rounded`: bfloat16 where faster.
    """
    file, pickled = path / "model.safetensors", path / "pytorch_model.bin"
    if pickled.exists() and not file.exists():
        raise ModelError(
            f"{pickled}: a pickle can run code and is not read: convert it to {file.name} with"
            " safetensors.torch.save_file"
        )
    values = read_json(path / "config.json")
    nested = values.get("transformer_layer_config")
    nested = nested if isinstance(nested, dict) else {}
    fields = Fields(str(path / "config.json"), {"model_type": "llama"} | values | nested)
    config, is_third = _config(fields, target.config, method), method == "eagle3"
    layers = _target_layers(fields, target.config.num_layers) if is_third else ()
    try:
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            stored = {n.removeprefix("midlayer.").removeprefix("layers.0."): n for n in names}
            found = {n: tuple(opened.get_slice(own).get_shape()) for n, own in stored.items()}
            if "hidden_norm.weight" in found and not is_third:
                raise ModelError(f"{file}: an EAGLE-3 head: set method to eagle3")
            _check(file, found, _shapes(config, target.config, layers, found))
            tensors = _Tensors(file, opened, stored, target, is_rounded)
            # Speculators' default differs from that of the others.
            adds_normed = fields.flag("norm_before_residual", default=bool(nested))
            return tensors.head(config, layers, adds_normed)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read as an EAGLE head: {error}") from error


def _config(fields: Fields, target: ModelConfig, method: str) -> ModelConfig:
    """Return the shape of the head, with its draft vocabulary, after a check against the target."""
    config, size = from_hf(fields.source, fields.values), target.vocab_size
    hidden, drafted = "hidden_size", size
    if method == "eagle3":
        hidden = "target_hidden_size" if fields.values.get("target_hidden_size") else hidden
        drafted = fields.number("draft_vocab_size", int, size)
    wanted = {"num_hidden_layers": 1, "vocab_size": size, hidden: target.hidden_size}
    for name, right in wanted.items():
        if fields.number(name, int) != right:
            found = fields.values[name]
            raise fields.refuse(f"{name} is {found}, but {right} in a head for this model")
    if not 0 < drafted <= size:
        raise fields.refuse(f"draft_vocab_size {drafted} is not in [1, {size}]")
    return dataclasses.replace(config, vocab_size=drafted)


def _target_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head reads."""
    listed, first, nested = fields.values.get(_LAYER_IDS), 0, fields.values.get("eagle_config")
    if not listed and isinstance(nested, dict):
        # SpecForge numbers the outputs of layers here, vLLM the inputs above.
        listed, first = nested.get(_LAYER_IDS), 1
    if not listed:
        listed, first = [2, num_layers // 2, num_layers - 3], 0
    if not isinstance(listed, list) or not all(
        type(layer) is int and 0 <= layer + first <= num_layers for layer in listed
    ):
        raise fields.refuse(f"{_LAYER_IDS} {listed} are not layers of a model of {num_layers}")
    return tuple(layer + first for layer in listed)


def _shapes(
    config: ModelConfig, target: ModelConfig, layers: Sequence[int], found: Shapes
) -> Shapes:
    """Return the shapes of all tensors that the head must have, and of those in `found` that it may
    have. What it lacks is the target's.
    """
    hidden, inner, drafted = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    read = 2 * hidden if layers else hidden
    products = {
        "fc": (hidden, len(layers) * target.hidden_size or 2 * hidden),
        **dict(zip(_QKV, ((queries, read), (keys, read), (keys, read)), strict=True)),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = ("input_layernorm", "hidden_norm", "norm") if layers else ()
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in products.items()}
    shapes |= {f"{n}.weight": (hidden,) for n in ("post_attention_layernorm", *norms)}
    biases = {f"{n}.bias": products[n][:1] for n in _QKV}
    optional = biases | {"fc.bias": (hidden,), "embed_tokens.weight": (target.vocab_size, hidden)}
    if layers:
        optional |= {"lm_head.weight": (drafted, hidden), "d2t": (drafted,)}
        optional["t2d"] = (target.vocab_size,)
    needed = {*found, *(biases if biases.keys() & found.keys() else ())}
    if hidden != target.hidden_size:
        needed |= {"embed_tokens.weight", "lm_head.weight"}
    if drafted < target.vocab_size:
        needed.add("d2t")
    return shapes | {name: shape for name, shape in optional.items() if name in needed}


def _check(file: Path, found: Shapes, wanted: Shapes) -> None:
    for name in sorted({*found, *wanted}):
        own, right = found.get(name, "missing"), wanted.get(name, "known to an EAGLE head")
        if own != right:
            raise ModelError(f"{file}: tensor {name} is {own}, not {right}")


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Checked tensors of a file; `stored` maps their names, without that of the layer, to its."""

    file: Path
    opened: Any
    stored: Mapping[str, str]
    target: LlamaModel
    is_rounded: bool

    def head(self, config: ModelConfig, layers: tuple[int, ...], adds_normed: bool) -> EagleHead:
        target, draft_vocab, head = self.target, self._draft_vocab(), self.target.head
        if "lm_head.weight" in self.stored:
            head = self._linear("lm_head")
        elif draft_vocab is not None:
            head = make_linear(head.rows(draft_vocab), kernels=target.kernels)
        state_norm = self._weight("hidden_norm")
        layer = LayerWeights(
            input_norm=None if adds_normed else state_norm,
            qkv=self._linear(*_QKV),
            output=self._linear("self_attn.o_proj"),
            mlp_norm=self._read("post_attention_layernorm.weight"),
            gate_up=self._linear("mlp.gate_proj", "mlp.up_proj"),
            down=self._linear("mlp.down_proj"),
            window=config.window_of(0),
        )
        return EagleHead(
            *(config, target, layers, draft_vocab, self._embedding(), self._linear("fc")),
            *(self._weight("input_layernorm"), state_norm if adds_normed else None, layer),
            *(self._weight("norm"), head),
            # The positions in its config.json are often those of its training alone.
            model_rope_table(config, len(target.rope.cos), target.device),
        )

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self.opened.get_tensor(self.stored[name])
        return tensor.to(self.target.device, self.target.dtype)

    def _weight(self, name: str) -> Tensor | None:
        return self._read(f"{name}.weight") if f"{name}.weight" in self.stored else None

    def _linear(self, *names: str) -> Linear:
        """Return the product of stacked weights."""
        kernels = self.target.kernels
        weight = torch.cat([self._read(f"{name}.weight") for name in names])
        if f"{names[0]}.bias" in self.stored:
            bias = torch.cat([self._read(f"{name}.bias") for name in names])
            return make_linear(weight, bias, kernels)
        return (make_rounded_linear if self.is_rounded else make_linear)(weight, kernels=kernels)

    def _embedding(self) -> Linear:
        """Return the head's embedding; the target's if it has none, or only a copy."""
        own, shared = self._weight("embed_tokens"), self.target.embedding
        if own is None:
            return shared
        chunks = torch.split(torch.arange(len(own), device=own.device), _CHUNK_ROWS)
        is_copy = all(torch.equal(shared.rows(rows), own[rows]) for rows in chunks)
        return shared if is_copy else DenseLinear(own)

    def _draft_vocab(self) -> Tensor | None:
        """Return the token ids [Vd] of the rows of the head's output; None: all in order."""
        if "d2t" not in self.stored:
            return None
        offsets: Tensor = self.opened.get_tensor("d2t").long()
        tokens = (torch.arange(len(offsets)) + offsets).tolist()
        known = range(self.target.config.vocab_size)
        # A token in two columns would have a part of its probability in each.
        if len({*tokens} & {*known}) < len(tokens):
            raise ModelError(f"{self.file}: d2t has ids that the target does not, or one twice")
        return torch.tensor(tokens, device=self.target.device)
