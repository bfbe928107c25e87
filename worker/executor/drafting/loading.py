"""Chooses the configured drafter of the device, and loads its network from disk."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from worker.config import SpeculativeConfig
from worker.errors import ConfigError, ModelError
from worker.executor.drafting.draft_cache import bytes_per_token
from worker.executor.drafting.interface import DraftNetwork
from worker.models.draft_head import HEAD_FILE, DraftHead, load_draft_head, shipped_head
from worker.models.eagle_head import EagleHead, load_eagle_head
from worker.models.llama import LlamaModel, StepTensors
from worker.models.loader import load_model


class ModelNetwork:
    """A draft model with the target's vocabulary; implements `DraftNetwork`."""

    reads_states = False
    layers: tuple[int, ...] = ()
    draft_vocab: Tensor | None = None

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.config, self.max_positions = model.config, len(model.rope.cos)

    def reduce(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return states

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        return self.model.states(step, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class HeadNetwork:
    """A trained head; implements `DraftNetwork`.

    A head's own row p pairs the target's state of position p with token p + 1. Here that row has
    position p + 1, its slot and its token, so the cached data of a block depends on no token after
    the block; rotary embedding sees only differences of positions.
    """

    reads_states = True

    def __init__(self, head: DraftHead | EagleHead) -> None:
        self.head = head
        self.layers = head.layers
        self.config, self.max_positions = head.config, len(head.rope.cos)
        self.draft_vocab: Tensor | None = head.draft_vocab

    def reduce(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return self.head.reduce(states, inputs)

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        if features is None:
            raise ValueError("a head needs features")
        return self.head.forward(features, step, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


LoadNetwork = Callable[[LlamaModel], DraftNetwork]


def network_loader(config: SpeculativeConfig | None, max_positions: int) -> LoadNetwork | None:
    """Return a function that loads the drafter's network for a target; None: no drafter runs here.

    The function raises `ModelError` for a network that cannot be loaded, and `ConfigError` if there
    is none or it does not fit the target.
    """
    if config is None:
        return None
    if config.method == "draft_model":
        return lambda target: _draft_model(config.model, target, max_positions)
    if config.method in ("eagle", "eagle3"):
        return lambda target: _head(config.model, target, config.method)
    return None


def drafter_bytes_per_token(
    network: DraftNetwork, target: LlamaModel, kv_dtype: torch.dtype
) -> int:
    state_size = network.config.hidden_size if network.reads_states else 0
    return bytes_per_token(network.config, state_size, target.dtype, kv_dtype)


def _draft_model(path: str | None, target: LlamaModel, max_positions: int) -> ModelNetwork:
    if path is None:
        raise ConfigError("--speculative-config: method draft_model needs model, a path")
    try:
        kernels = target.kernels
        model = load_model(path, target.dtype, target.device, max_positions, kernels=kernels)
    except ModelError as error:
        raise ModelError(f"--speculative-config: model {error}") from error
    if model.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"--speculative-config: model {path} has a vocabulary of {model.config.vocab_size}"
            f" tokens, the target one of {target.config.vocab_size}; a draft model needs the same"
            " tokenizer"
        )
    return ModelNetwork(model)


def _head(path: str | None, target: LlamaModel, method: str) -> HeadNetwork:
    found = shipped_head(target) if path is None else Path(path)
    if found is None:
        raise ConfigError(
            "--speculative-config: no trained head for this model comes with the package, nor is"
            " one in the cache; make one with `pointsman train-draft --model …`, or give model,"
            " its path"
        )
    try:
        if method == "eagle3" or (found / "config.json").is_file():
            return HeadNetwork(load_eagle_head(found, target, method, is_rounded=True))
        file = found / HEAD_FILE if found.is_dir() else found
        return HeadNetwork(load_draft_head(file, target, is_rounded=True))
    except ModelError as error:
        field = "head" if path is None else "model"
        raise ModelError(f"--speculative-config: {field} {error}") from error
