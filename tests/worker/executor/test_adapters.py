"""Adapters of one batch equal their merged checkpoints; unsupported files are refused."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.model.eagle_heads import Layout, write_head
from tests.support.model.lora_files import ALL, merge, weight_shapes, write_adapter
from tests.support.model.model_variants import PARTLY, PHI3, QWEN3_MOE, TINY
from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.model.whole_engine import outputs_of, torch_config
from worker.config import LoraConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.process.build import build_core
from worker.errors import ModelError
from worker.models.adapters import read_adapter
from worker.models.checkpoints import open_checkpoint
from worker.models.loader import expected_shapes
from worker.ops.parallel import Shard
from worker.types import Adapter, SamplingParams

NUM_ADAPTERS = 5
Asked = tuple[Sequence[int], Adapter | None]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder, shapes = tmp_path_factory.mktemp("adapters"), weight_shapes(tiny_checkpoint)
    changes: list[dict[str, Any]] = [
        {},
        {"rank": 8, "use_rslora": True},
        {"targets": ("q_proj", "v_proj")},
        {"targets": ("o_proj", "up_proj", "down_proj"), "rank": 1},
        {"targets": ("gate_proj", "k_proj"), "rank": 16, "lora_alpha": 4},
    ]
    return [
        Adapter(f"a{n}", str(write_adapter(folder / f"a{n}", shapes, n, **change)), n + 1)
        for n, change in enumerate(changes)
    ]


def make_core(checkpoint: Path, max_loras: int = NUM_ADAPTERS, **changes: Any) -> EngineCore:
    lora = LoraConfig(max_loras, max(max_loras, NUM_ADAPTERS))
    changes = {"num_blocks_override": 64, "lora": lora, **changes}
    return build_core(torch_config(checkpoint, **changes))[0]


def run(
    core: EngineCore, asked: Sequence[Asked], params: SamplingParams = GREEDY
) -> list[list[RequestOutput]]:
    requests = [
        AddRequest(str(number), list(prompt), params, 0.0, adapter=adapter)
        for number, (prompt, adapter) in enumerate(asked)
    ]
    return list(outputs_of(core, requests).values())


def answers(core: EngineCore, asked: Sequence[Asked]) -> list[list[int]]:
    return [[token for o in outputs for token in o.token_ids] for outputs in run(core, asked)]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 60) for _ in range(rng.randrange(3, 40))] for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_backend": "torch"},
        {"scheduler": SchedulerConfig(max_model_len=256, max_num_batched_tokens=16)},
        {"speculative": SpeculativeConfig("ngram", 4)},
    ],
    ids=["native", "torch", "chunks", "drafts"],
)
def test_adapters_in_one_batch_are_their_merged_checkpoints(
    changes: dict[str, Any], tiny_checkpoint: Path, adapters: list[Adapter], tmp_path: Path
) -> None:
    chosen: list[Adapter | None] = [*adapters, None]
    texts = prompts(2 * len(chosen))
    core = make_core(tiny_checkpoint, **changes)
    found = answers(core, list(zip(texts, [*chosen, *chosen], strict=True)))
    core.shutdown()
    merged: list[list[int]] = [[] for _ in texts]
    for place, adapter in enumerate(chosen):
        checkpoint = tiny_checkpoint
        if adapter is not None:
            checkpoint = merge(checkpoint, Path(adapter.path), tmp_path / adapter.name)
        alone = make_core(checkpoint, **changes)
        own = place, place + len(chosen)
        merged[own[0]], merged[own[1]] = answers(alone, [(texts[n], None) for n in own])
        alone.shutdown()
    assert found == merged
    assert len({tuple(tokens) for tokens in found}) == len(found)


FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FUSED_SIZES = {**TINY, "vocab_size": 61, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        ({**FUSED_SIZES, **PHI3, "model_type": "phi3", "rope_parameters": PARTLY}, FUSED),
        ({**FUSED_SIZES, **QWEN3_MOE, "model_type": "qwen3_moe"}, ALL[:4]),
    ],
    ids=["phi3", "attention of a mixture"],
)
def test_adapters_of_other_layouts_are_their_merged_checkpoints(
    config: dict[str, Any], targets: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    save_checkpoint(tmp_path / "model", config)
    shapes = weight_shapes(tmp_path / "model")
    path = write_adapter(tmp_path / "adapter", shapes, seed=3, targets=targets)
    merged = merge(tmp_path / "model", path, tmp_path / "merged")
    adapter, texts = Adapter("a", str(path), 1), prompts(3)
    core = make_core(tmp_path / "model")
    found = answers(core, [(text, adapter) for text in texts])
    assert found == answers(make_core(merged), [(text, None) for text in texts])
    assert found != answers(core, [(text, None) for text in texts])


def test_a_fused_module_is_for_models_that_fuse_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = open_checkpoint(tiny_checkpoint).config
    shapes = {"model.layers.0.self_attn.qkv_proj.weight": (112, config.hidden_size)}
    path = write_adapter(tmp_path / "a", shapes, seed=0, targets=FUSED)
    with pytest.raises(ModelError, match=r"no place for tensor .*qkv_proj"):
        read_adapter(str(path), config, max_rank=16)


def test_an_answer_does_not_depend_on_its_batch(
    tiny_checkpoint: Path, adapters: list[Adapter]
) -> None:
    """Log probabilities are equal to the last bit alone, in a batch, and with too few slots."""
    params = replace(GREEDY, logprobs=3)
    requests = list(zip(prompts(6, seed=1), [*adapters, None], strict=True))

    def drawn(core: EngineCore, some: Sequence[Asked]) -> list[Any]:
        outputs_by_request = run(core, some, params)
        core.shutdown()
        return [[(o.token_ids, o.logprobs) for o in outputs] for outputs in outputs_by_request]

    together = drawn(make_core(tiny_checkpoint), requests)
    assert drawn(make_core(tiny_checkpoint, max_loras=1), requests) == together
    for request, wanted in zip(requests[:-1], together, strict=False):
        assert drawn(make_core(tiny_checkpoint), [request]) == [wanted]
    assert drawn(make_core(tiny_checkpoint, lora=None), requests[-1:]) == together[-1:]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_without_the_adapter_changes_no_token(
    method: str, tiny_checkpoint: Path, adapters: list[Adapter], tmp_path: Path
) -> None:
    """A head reads the states between the layers, whose products the adapters change."""
    drafts = SpeculativeConfig(method, 3, str(tiny_checkpoint))
    if method == "eagle3":
        target = open_checkpoint(tiny_checkpoint).config
        layout = Layout("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
        drafts = replace(drafts, model=str(write_head(tmp_path, layout, target)))
    requests = list(zip(prompts(6, seed=3), [*adapters, None], strict=True))
    plain, drafted = make_core(tiny_checkpoint), make_core(tiny_checkpoint, speculative=drafts)
    assert answers(drafted, requests) == answers(plain, requests)


def test_blocks_of_one_adapter_are_no_hits_for_another(
    tiny_checkpoint: Path, adapters: list[Adapter]
) -> None:
    """Hits are neither for the model alone nor for an adapter loaded later under the same name."""
    core, prompt = make_core(tiny_checkpoint), list(range(3, 43))

    def num_cached(adapter: Adapter | None) -> int:
        (outputs,) = run(core, [(prompt, adapter)])
        return outputs[-1].num_cached_tokens

    other = replace(adapters[0], number=9, version=1)
    assert [num_cached(a) for a in (adapters[0], adapters[1], None, other)] == [0, 0, 0, 0]
    assert num_cached(adapters[0]) >= 32


def test_an_adapter_that_cannot_be_read_fails_its_request_alone(
    tiny_checkpoint: Path, adapters: list[Adapter], tmp_path: Path
) -> None:
    core, (text,) = make_core(tiny_checkpoint), prompts(1)
    late = Adapter("late", str(tmp_path / "late"), 7)
    failed, answered = run(core, [(text, late), (text, adapters[0])])
    assert failed[-1].error is not None
    assert f"there is no file {tmp_path / 'late' / 'adapter_config.json'}" in failed[-1].error
    assert answered[-1].error is None
    write_adapter(tmp_path / "late", weight_shapes(tiny_checkpoint), seed=0)
    assert answers(core, [(text, late)]) == answers(core, [(text, adapters[0])])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2} is not supported"),
        ({"target_modules": ["lm_head"]}, "target_modules has 'lm_head'"),
        ({"rank": 32}, r"rank 32 is not in \[1, 16\]: --max-lora-rank raises the limit"),
        ({"r": 3}, r"lora_A.weight has shape \[4, 80\], not \[3, 80\]"),
        ({"r": "many"}, "Expected `int`"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    changes: dict[str, Any], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", weight_shapes(tiny_checkpoint), seed=0, **changes)
    with pytest.raises(ModelError, match=message):
        read_adapter(str(path), open_checkpoint(tiny_checkpoint).config, max_rank=16)


def test_adapters_of_experts_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    dense = open_checkpoint(tiny_checkpoint).config
    mixture = replace(dense, num_experts=2, experts_per_token=1, expert_size=80)
    shapes = expected_shapes(mixture)
    layers = read_adapter(str(write_adapter(tmp_path / "a", shapes, 0, 4, ALL[:4])), mixture, 16)
    assert [set(layer) for layer in layers] == [{"qkv", "output"}] * dense.num_layers
    path = write_adapter(tmp_path / "b", shapes, seed=0)
    with pytest.raises(ModelError, match=r"experts.0.down_proj.lora_A.weight adapts experts"):
        read_adapter(str(path), mixture, max_rank=16)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_an_adapter_are_parts_of_it(
    size: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """With more ranks than KV heads, two ranks have the same head."""
    tiny = open_checkpoint(tiny_checkpoint).config
    config = replace(tiny, num_heads=4, num_kv_heads=2, intermediate_size=80)
    path = str(write_adapter(tmp_path / "a", expected_shapes(config), seed=0))
    whole = read_adapter(path, config, 16)
    shards = [read_adapter(path, config, 16, Shard(rank, size)) for rank in range(size)]
    for index, layer in enumerate(whole):
        for product, factors in layer.items():
            own = [shard[index][product] for shard in shards]
            for place, part in enumerate(factors.parts):
                assert part is not None
                (down, up), parts = part, [each.parts[place] for each in own]
                downs, ups = zip(*(each for each in parts if each is not None), strict=True)
                if product in ("output", "down"):
                    assert torch.equal(torch.cat(downs, 1), down)
                    assert all(torch.equal(each, up) for each in ups)
                    continue
                step = size // 2 if product == "qkv" and place else 1
                assert torch.equal(torch.cat(ups[::step]), up)
                assert all(torch.equal(each, down) for each in downs)
                assert torch.equal(torch.cat(ups[step - 1 :: step]), up)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.self_attn.q_proj.lora_A", None, "layers.0.self_attn.q_proj has lora_B alone"),
        ("layers.7.self_attn.q_proj.lora_A", (4, 48), "no place for tensor .*layers.7"),
        ("layers.0.mlp.up_proj.lora_B", (5, 4), r"shape \[5, 4\], not"),
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", (4,), "no place for tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, shape: tuple[int, ...] | None, message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", weight_shapes(tiny_checkpoint), seed=0)
    tensors = load_file(path / "adapter_model.safetensors")
    stored = f"base_model.model.model.{name}.weight"
    tensors.pop(stored, None)
    if shape is not None:
        tensors[stored] = torch.zeros(shape)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        read_adapter(str(path), open_checkpoint(tiny_checkpoint).config, max_rank=16)
