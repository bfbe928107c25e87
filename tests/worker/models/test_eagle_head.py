"""Published EAGLE heads compute what their authors' code does, or are refused with the reason."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.model.eagle_heads import LAYOUTS, Published, TargetWeights, write_head
from tests.support.model.tiny_checkpoint import configure, edit, save_checkpoint
from tests.support.model.tiny_llama import BLOCK_SIZE, empty_cache, step_of
from worker.errors import ModelError
from worker.models.eagle_head import load_eagle_head
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.cpu.native import CpuKernels, open_kernels
from worker.ops.linear import DenseLinear

CPU = torch.device("cpu")
NUM_LAYERS = 6
TARGET = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
TOKENS = [5, 17, 42, 3, 9, 33, 21, 60, 1, 7, 7, 58, 12, 30, 29, 4, 11, 50, 2, 36]
TABLE = range(-(-len(TOKENS) // BLOCK_SIZE))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_checkpoint(path, TARGET)
    return path


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> LlamaModel:
    return load_model(checkpoint, torch.float32, CPU)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels | None:
    if request.param == "torch":
        return None
    found = open_kernels(2)
    if found is None:
        pytest.skip("the native kernels are not built")
    return found


def published(path: Path, checkpoint: Path) -> Published:
    weights = load_file(checkpoint / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    return Published(path, TargetWeights(*(weights[name] for name in names), 1e-5), NUM_LAYERS)


@torch.inference_mode()
def states_of(model: LlamaModel, token_ids: Sequence[int]) -> list[Tensor]:
    """Return the states that enter each layer, and the one that leaves the last."""
    step, cache = step_of(token_ids, 0, TABLE), empty_cache(model.config)
    return model.states_and_inputs(step, cache, range(NUM_LAYERS + 1))[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_logits_are_those_of_the_published_computation(
    layout: str, kernels: CpuKernels | None, checkpoint: Path, tmp_path: Path
) -> None:
    """The first round reads the target's states, the second one the head's own."""
    model = load_model(checkpoint, torch.float32, CPU, kernels=kernels)
    path = write_head(tmp_path, LAYOUTS[layout], model.config)
    head, own = load_eagle_head(path, model, LAYOUTS[layout].method), published(path, checkpoint)
    states, inputs = model.states_and_inputs(
        step_of(TOKENS[:-1], 0, TABLE), empty_cache(model.config), head.layers
    )
    features = head.reduce(states, inputs)
    cache = empty_cache(head.config)
    hidden = head.forward(features[:-1], step_of(TOKENS[1:-1], 0, TABLE), cache)
    given = own.features(states_of(model, TOKENS[:-1]))
    torch.testing.assert_close(features, given, rtol=1e-4, atol=1e-4)
    expected = own.states(given[:-1], TOKENS[1:-1])
    torch.testing.assert_close(head.logits(hidden), own.logits(expected), rtol=1e-3, atol=1e-3)
    step = step_of(TOKENS[-1:], len(TOKENS) - 2, TABLE)
    second = head.logits(head.forward(hidden[-1:], step, cache))
    given = torch.cat((given[:-1], expected[-1:]))
    expected = own.logits(own.states(given, TOKENS[1:])[-1:])
    torch.testing.assert_close(second, expected, rtol=1e-3, atol=1e-3)
    tokens = range(61) if head.draft_vocab is None else head.draft_vocab.tolist()
    assert list(tokens) == own.tokens.tolist()


def test_a_copy_of_the_targets_embedding_takes_no_memory(
    target: LlamaModel, checkpoint: Path, tmp_path: Path
) -> None:
    path = write_head(tmp_path, LAYOUTS["eagle, biased"], target.config)
    assert isinstance(load_eagle_head(path, target, "eagle").embedding, DenseLinear)
    words = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    edit(path, lambda tensors: tensors.update({"embed_tokens.weight": words}))
    assert load_eagle_head(path, target, "eagle").embedding is target.embedding


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("eagle", {"hidden_size": 48}, r"hidden_size is 48, but 32 in a head for this model"),
        ("eagle3", {"target_hidden_size": 48}, r"target_hidden_size is 48, but 32"),
        ("eagle", {"vocab_size": 90}, r"vocab_size is 90, but 61"),
        ("eagle3", {"num_hidden_layers": 2}, r"num_hidden_layers is 2, but 1"),
        ("eagle3", {"draft_vocab_size": 62}, r"draft_vocab_size 62 is not in \[1, 61\]"),
        ("eagle3", {"vocab_size": None}, r"vocab_size is missing"),
        ("eagle3", {IDS: [2, 3, 7]}, rf"{IDS} \[2, 3, 7\] are not layers of a model of 6"),
        ("eagle3", {"eagle_config": {IDS: [6]}}, r"\[6\] are not layers of a model of 6"),
        ("eagle3", {IDS: "all"}, r"all are not layers of a model of 6"),
        ("eagle3", {"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
    ],
)
def test_a_head_for_another_model_is_refused_with_the_field(
    layout: str, changes: dict[str, object], message: str, target: LlamaModel, tmp_path: Path
) -> None:
    path = write_head(tmp_path, LAYOUTS[layout], target.config)
    configure(path, **changes)
    with pytest.raises(ModelError, match=f"^{path / 'config.json'}: .*{message}"):
        load_eagle_head(path, target, LAYOUTS[layout].method)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("eagle3", {"fc.weight": None}, r"fc.weight is missing, not \(32, 96\)"),
        ("eagle3", {"fc.weight": (32, 64)}, r"fc.weight is \(32, 64\), not \(32, 96\)"),
        ("eagle3", {"fc_norm.0.weight": (32,)}, r"fc_norm.0.weight is \(32,\), not known"),
        ("eagle3", {"d2t": None}, r"d2t is missing"),
        ("eagle3, another size", {"embed_tokens.weight": None}, r"embed_tokens.weight is missing"),
        ("eagle", {"lm_head.weight": (61, 32)}, r"lm_head.weight is \(61, 32\), not known"),
        ("eagle, biased", {"layers.0.self_attn.v_proj.bias": None}, r"v_proj.bias is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    layout: str,
    changes: dict[str, tuple[int, ...] | None],
    message: str,
    target: LlamaModel,
    tmp_path: Path,
) -> None:
    path = write_head(tmp_path, LAYOUTS[layout], target.config)
    tensors = load_file(path / "model.safetensors")
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=f"^{path / 'model.safetensors'}: .*{message}"):
        load_eagle_head(path, target, LAYOUTS[layout].method)


@pytest.mark.parametrize("change", [lambda d2t: d2t + 61, lambda d2t: -torch.arange(len(d2t))])
def test_draft_tokens_that_the_target_lacks_or_that_repeat_are_refused(
    change: Callable[[Tensor], Tensor], target: LlamaModel, tmp_path: Path
) -> None:
    path = write_head(tmp_path, LAYOUTS["eagle3"], target.config)
    edit(path, lambda tensors: tensors.update(d2t=change(tensors["d2t"])))
    with pytest.raises(ModelError, match="d2t has ids that the target does not, or one twice"):
        load_eagle_head(path, target, "eagle3")


def test_a_head_of_the_other_method_is_refused(target: LlamaModel, tmp_path: Path) -> None:
    write_head(tmp_path, LAYOUTS["eagle3"], target.config)
    with pytest.raises(ModelError, match="an EAGLE-3 head: set method to eagle3"):
        load_eagle_head(tmp_path, target, "eagle")


def test_pickled_weights_are_refused_with_the_way_out(target: LlamaModel, tmp_path: Path) -> None:
    path = write_head(tmp_path, LAYOUTS["eagle"], target.config)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: .* not read: convert it to model"):
        load_eagle_head(path, target, "eagle")
    (path / "pytorch_model.bin").rename(path / "other.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read as an EAGLE head"):
        load_eagle_head(path, target, "eagle")
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1
