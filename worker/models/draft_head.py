"""A draft head: one small layer that predicts the target's next tokens.

After EAGLE (Li et al., arXiv:2401.15077): from the target's hidden state of position p and token
p+1, the head computes a state of its own for position p+1, and from that the likeliest tokens p+2.
To draft further, it uses its own state in place of the target's. It can draft a part of the
target's vocabulary (`draft_vocab`, as in EAGLE-3, arXiv:2503.01840), and shares the target's
embedding and output rows.

A head's file has the fingerprint of its target, which is checked before any tensor is used.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.errors import ModelError
from worker.models.config import ModelConfig
from worker.models.llama import LayerWeights, LlamaModel, StepTensors, layer_states, native_layers
from worker.ops.backends import Backend, rms_norm
from worker.ops.cpu.native import NativeLayers
from worker.ops.linear import Linear, make_linear, make_rounded_linear
from worker.ops.rope import RopeTable

FORMAT = "pointsman-draft-head"
HEAD_FILE = "head.safetensors"
# The numbers of rows in a fingerprint: of the embedding, and of two matrices of every layer.
_EMBEDDING_ROWS, _LAYER_ROWS = 1024, 16


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes in a head's file; all others follow from the target."""

    intermediate_size: int
    draft_vocab_size: int

    def config(self, target: ModelConfig) -> ModelConfig:
        return dataclasses.replace(
            target,
            vocab_size=self.draft_vocab_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            no_rope_layers=frozenset(),
            window=0,
            activation="silu",
            post_norms=False,
            attention_scale=0.0,
            attention_softcap=0.0,
            num_experts=0,
        )

    def tensor_shapes(self, target: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a head's tensors, except `draft_vocab`, by name."""
        hidden, inner = target.hidden_size, self.intermediate_size
        queries = target.num_heads * target.head_dim
        keys = target.num_kv_heads * target.head_dim
        return {
            "feature_norm": (hidden,),
            "embedding_norm": (hidden,),
            "fuse": (hidden, 2 * hidden),
            "input_norm": (hidden,),
            "qkv": (queries + 2 * keys, hidden),
            "output": (hidden, queries),
            "mlp_norm": (hidden,),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "output_norm": (hidden,),
        }


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights of a head on its target's device and in its dtype. Holds no state between steps.

    `draft_vocab` [Vd] int64 maps the columns of `logits` to token ids of the target.
    """

    config: ModelConfig
    draft_vocab: Tensor
    embedding: Linear
    feature_norm: Tensor
    embedding_norm: Tensor
    fuse: Linear
    layer: LayerWeights
    output_norm: Tensor
    head: Linear
    rope: RopeTable
    native: NativeLayers | None
    backend: Backend
    layers: tuple[int, ...] = ()  # of the target, whose inputs it reads

    def reduce(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return states

    def forward(self, features: Tensor, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Return the head's hidden states [T, H] of every row.

        `features` [T, H] are the target's, before its final norm, or this method's result for the
        position before. `step.token_ids` are shifted: row p has token p+1; positions, slots and
        attention are those of p.
        """
        eps = self.config.rms_norm_eps
        words = rms_norm(self.embedding.rows(step.token_ids), self.embedding_norm, eps)
        thoughts = rms_norm(features, self.feature_norm, eps)
        x = self.fuse(torch.cat((words, thoughts), dim=-1))
        if self.native is not None:
            return self.native.run(x, self.rope, kv_cache, step, range(1))
        model = ([self.layer], self.config, self.rope)
        *_, states = layer_states(x, *model, kv_cache, step, self.backend)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, Vd] float32 over `draft_vocab` of hidden states [R, H]."""
        return self.head(rms_norm(hidden, self.output_norm, self.config.rms_norm_eps)).float()


def fingerprint(target: LlamaModel) -> str:
    """Digest a target's weights, to the same value in every dtype.

    It covers the signs of some rows of the embedding and of every layer's first and last matrix,
    which do not depend on rounding, but change with quantisation and with training of any part of a
    layer.
    """
    config = target.config
    digest = hashlib.sha256()
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads)
    digest.update(f"{config.architecture} {config.vocab_size} {sizes} {config.head_dim}".encode())
    words = torch.arange(
        0, config.vocab_size, max(1, config.vocab_size // _EMBEDDING_ROWS), device=target.device
    )
    digest.update(_signs(target.embedding.rows(words)))
    num_qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv, hidden = (_spread(size, target.device) for size in (num_qkv, config.hidden_size))
    for layer in target.layers:
        digest.update(_signs(layer.qkv.rows(qkv)))
        digest.update(_signs(layer.down.rows(hidden)))
    return digest.hexdigest()[:32]


def _signs(rows: Tensor) -> bytes:
    # float16 rounds the smallest numbers to 0 in every dtype, so that their signs agree.
    return (rows.to(torch.float16) > 0).cpu().numpy().tobytes()


def _spread(size: int, device: torch.device) -> Tensor:
    """Return the indices of about _LAYER_ROWS rows spread over `size`, int64."""
    return torch.arange(0, size, max(1, size // _LAYER_ROWS), device=device)


def load_draft_head(path: Path, target: LlamaModel, *, is_rounded: bool = False) -> DraftHead:
    """Load a head for its target, or raise `ModelError`. `is_rounded`: bfloat16 where faster."""
    shape, tensors = read_head(path, target)
    vocab = tensors["draft_vocab"].to(target.device)
    return assemble(shape, tensors, vocab, target, is_rounded=is_rounded)


def read_head(path: Path, target: LlamaModel) -> tuple[HeadShape, dict[str, Tensor]]:
    """Read a head's shape and tensors. Raise `ModelError` if the file is not one of this target."""
    shape = _checked_shape(path, _metadata(path), target)
    wanted = shape.tensor_shapes(target.config) | {"draft_vocab": (shape.draft_vocab_size,)}
    try:
        with safe_open(path, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            # Extra tensors are refused too: they would be ignored silently.
            if found != wanted:
                odd = sorted({name for name, _ in found.items() ^ wanted.items()})
                raise ModelError(f"{path}: tensors {', '.join(odd)} are not as its metadata says")
            tensors = {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read as a draft head: {error}") from error
    vocab = tensors["draft_vocab"] = tensors["draft_vocab"].to(torch.int64)
    # An id out of range would index past the target's rows.
    if not bool(((vocab >= 0) & (vocab < target.config.vocab_size)).all()):
        raise ModelError(f"{path}: draft_vocab has ids that the target does not")
    return shape, tensors


def assemble(
    shape: HeadShape,
    tensors: Mapping[str, Tensor],
    draft_vocab: Tensor,
    target: LlamaModel,
    *,
    is_rounded: bool = False,
) -> DraftHead:
    """Build a head from tensors with the names and shapes of `HeadShape.tensor_shapes`."""
    make = make_rounded_linear if is_rounded else make_linear
    linear = functools.partial(make, kernels=target.kernels)
    names = shape.tensor_shapes(target.config)
    given = {name: tensors[name].to(target.device, target.dtype) for name in names}
    config = shape.config(target.config)
    layer = LayerWeights(
        input_norm=given["input_norm"],
        qkv=linear(given["qkv"]),
        output=linear(given["output"]),
        mlp_norm=given["mlp_norm"],
        gate_up=linear(given["gate_up"]),
        down=linear(given["down"]),
    )
    return DraftHead(
        config=config,
        draft_vocab=draft_vocab,
        embedding=target.embedding,
        feature_norm=given["feature_norm"],
        embedding_norm=given["embedding_norm"],
        fuse=linear(given["fuse"]),
        layer=layer,
        output_norm=given["output_norm"],
        head=linear(target.head.rows(draft_vocab)),
        rope=target.rope,
        native=native_layers([layer], config) if target.kernels is not None else None,
        backend=target.backend,
    )


def shipped_head(target: LlamaModel, heads: Path | None = None) -> Path | None:
    """Find a head of this target, shipped or in `heads`, where `pointsman train-draft` writes."""
    name = fingerprint(target)
    trained = (heads or heads_directory()) / name / HEAD_FILE
    # The operator trained the first one on purpose, so it takes precedence.
    for path in (trained, *_packaged()):
        if path.is_file() and _fits(path, name):
            return path
    return None


def heads_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this machine's heads: in $POINTSMAN_CACHE, else ~/.cache/pointsman."""
    chosen = environment.get("POINTSMAN_CACHE")
    return (Path(chosen) if chosen else Path.home() / ".cache/pointsman") / "heads"


def _packaged() -> Iterator[Path]:
    directory = resources.files("worker.models").joinpath("heads")
    if isinstance(directory, Path) and directory.is_dir():
        yield from sorted(directory.glob("*.safetensors"))


def _fits(path: Path, name: str) -> bool:
    try:
        return _metadata(path).get("fingerprint") == name
    except ModelError:
        return False


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path}: cannot be read as a draft head ({error}); `pointsman train-draft` makes one"
            " for a model"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ModelError(
            f"{path}: not a draft head of ours; `pointsman train-draft` makes one for a model"
        )
    return metadata


def _checked_shape(path: Path, metadata: Mapping[str, str], target: LlamaModel) -> HeadShape:
    name = fingerprint(target)
    if metadata.get("fingerprint") != name:
        raise ModelError(
            f"{path}: trained for another model (fingerprint {metadata.get('fingerprint')}, this"
            f" one has {name}); make one with `pointsman train-draft --model …`"
        )
    try:
        shape = msgspec.json.decode(metadata.get("config", ""), type=HeadShape)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: its metadata is broken ({error}); train it anew") from error
    sizes = (shape.intermediate_size, shape.draft_vocab_size)
    if min(sizes) < 1 or shape.draft_vocab_size > target.config.vocab_size:
        raise ModelError(f"{path}: sizes that cannot be: {shape}; train it anew")
    return shape
