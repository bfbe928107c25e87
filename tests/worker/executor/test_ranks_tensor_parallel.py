"""Two ranks on a CPU answer as one process does, and sleep and wake together."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from tests.depth import by_depth, some
from tests.support.model import eagle_heads
from tests.support.model.lora_files import weight_shapes, write_adapter
from tests.support.model.model_variants import GEMMA2, PARTLY, PHI3, TINY
from tests.support.model.tiny_checkpoint import save_checkpoint, save_random_head
from tests.support.model.whole_engine import (
    NUM_SLOTS,
    Outputs,
    Way,
    run_way,
    tokens_of,
    torch_config,
)
from worker.config import EngineConfig, LoraConfig, SpeculativeConfig
from worker.engine.messages import AddRequest
from worker.errors import ConfigError, DeviceMemoryError, ModelError
from worker.executor import ranks
from worker.executor.interface import Executor, execute
from worker.executor.ranks import agree_on_blocks
from worker.executor.start import build_executor, choose_device
from worker.models.checkpoints import open_checkpoint
from worker.ops.parallel import Shard
from worker.types import (
    Adapter,
    KvLoad,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)

# A vocabulary that two ranks cannot halve, a head of its own, and biases everywhere.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 91,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
}
SIZES = {"vocab_size": 91, "tie_word_embeddings": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "phi3": {
        **PHI3,
        "model_type": "phi3",
        "hidden_size": 64,
        "rope_parameters": PARTLY,
        "sliding_window": 40,
    },
    "gemma2": {**GEMMA2, "model_type": "gemma2", "num_hidden_layers": 2},
    "one KV head": {**CONFIG, "num_key_value_heads": 1},
}
# Widths of whole blocks of quantised weights, but for half of the inner size.
BLOCKS = {**CONFIG, "vocab_size": 91, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 2,
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
}
NATIVE = {"attention_backend": "auto", "num_threads": 2}
# A model, the settings of both engines, and the device's drafter of the ranks.
MIXES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "experts, with a draft head": (EXPERTS, {}, "eagle"),
    "eight bits, with a draft model": ({}, {**NATIVE, "quantization": "q8_0"}, "draft_model"),
    "experts in four bits": (EXPERTS, {**NATIVE, "quantization": "q4_1"}, None),
    "one KV head, with a draft head": ({"num_key_value_heads": 1}, NATIVE, "eagle"),
    "drawn drafts of a draft model": ({}, {}, "probabilistic"),
    "an EAGLE-3 head": ({"num_hidden_layers": 6}, {}, "eagle3"),
}
BOTH = frozenset({"weights", "kv_cache"})


WAYS = {
    "batched, one step ahead": Way(overlap=True),
    "chunked and preempted, one step ahead": Way(40, 48, 16, overlap=True, preempts=True),
    "with drafts": Way(drafts=3),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(path, CONFIG)
    return path


def config_of(checkpoint: Path, size: int, **changes: Any) -> EngineConfig:
    same = {"block_size": 8, "attention_backend": "torch", "device": "cpu"}
    same = {"block_size": 8, "attention_backend": "torch", "device": "cpu"}
    sizes = {"num_blocks_override": 200, "tensor_parallel_size": size}
    changes.setdefault("lora", LoraConfig(NUM_SLOTS))
    return torch_config(checkpoint, **{**same, **sizes, **changes})


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Executor:
    return build_executor(config_of(checkpoint, 1))[0]


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path) -> Iterator[Executor]:
    executor, num_blocks = build_executor(config_of(checkpoint, 2))
    assert num_blocks == 200
    yield executor
    executor.shutdown()
    executor.shutdown()
    for call in (lambda: executor.wake(BOTH), lambda: execute(executor, SchedulerOutput(0, ()))):
        with pytest.raises(RuntimeError, match="shut down"):
            call()


def requests() -> list[AddRequest]:
    draw = Random(11)
    stem = [draw.randrange(91) for _ in range(20)]
    made = []
    for index in range(200):
        own = [draw.randrange(91) for _ in range(draw.randrange(2, 14))]
        prompt = (stem if index % 3 else []) + own + own[:4]
        wishes: dict[str, Any] = {"temperature": 0.0}
        if index % 2:
            wishes = {"temperature": 0.9, "top_p": 0.9}
        if index % 5 == 0:
            wishes |= {"logprobs": 3}
        if index % 10 == 0:
            wishes |= {"prompt_logprobs": 1}
        if index % 7 == 0:
            wishes |= {"repetition_penalty": 1.3}
        params = SamplingParams(max_tokens=3 + index % 4, seed=index, ignore_eos=True, **wishes)
        branches = [f"{index}/{n}" for n in (1, 2)] if index % 8 == 1 else []
        made.append(AddRequest(str(index), prompt, params, 0.0, branch_ids=branches))
    return made


def run(executor: Executor, way: Way, asked: list[AddRequest] | None = None) -> Outputs:
    return run_way(executor, way, requests() if asked is None else asked)


def parts_of(outputs: Outputs, field: str) -> dict[str, list[Any]]:
    return {
        name: [entry for output in each for entry in getattr(output, field)]
        for name, each in outputs.items()
    }


# A process is in one group at a time: before `two_ranks` is.
@pytest.mark.parametrize("name", some(LAYOUTS))
def test_other_layouts_answer_as_one_process(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {**TINY, **SIZES, **LAYOUTS[name]})
    asked, way = requests()[:40], Way(overlap=True)
    expected = run(build_executor(config_of(tmp_path, 1))[0], way, asked)
    executor, _ = build_executor(config_of(tmp_path, 2))
    try:
        found = run(executor, way, asked)
        if name == "one KV head":
            check_kv_moves(build_executor(config_of(tmp_path, 1))[0], executor)
    finally:
        executor.shutdown()
    assert tokens_of(found) == tokens_of(expected)


def device_drafter(name: str | None, checkpoint: Path) -> SpeculativeConfig | None:
    """Return the drafter of a head of random weights, or of the target itself as a draft model."""
    same = {"enable_adaptive_verification": False}
    if name is None:
        return None
    if name == "eagle":
        return SpeculativeConfig(
            "eagle", 3, save_random_head(checkpoint, checkpoint / "head"), **same
        )
    if name == "eagle3":  # it draws from the rows of the target's own head
        config = open_checkpoint(checkpoint).config
        head = eagle_heads.write_head(
            checkpoint / "eagle3", eagle_heads.LAYOUTS["eagle3, all tokens"], config
        )
        return SpeculativeConfig("eagle3", 3, str(head), **same)
    if name == "probabilistic":
        same |= {"draft_sample_method": name}
    return SpeculativeConfig("draft_model", 3, str(checkpoint), **same)


@pytest.mark.parametrize("name", by_depth([*MIXES][:1], [*MIXES]))
def test_combined_features_answer_as_one_process(name: str, tmp_path: Path) -> None:
    model, settings, method = MIXES[name]
    save_checkpoint(tmp_path, {**BLOCKS, **model})
    drafter = device_drafter(method, tmp_path)
    asked = requests()[:60]
    if method == "probabilistic":  # such drafts change draws, though not their distribution
        asked = [request for request in asked if request.params.temperature == 0.0]
    plain = build_executor(config_of(tmp_path, 1, **settings))[0]
    expected = run(plain, Way(), asked)
    executor, _ = build_executor(config_of(tmp_path, 2, speculative=drafter, **settings))
    try:
        found = run(executor, Way(overlap=True, drafts=3 if drafter else 0, drafter=drafter), asked)
    finally:
        executor.shutdown()
    assert tokens_of(found) == tokens_of(expected)


@pytest.mark.parametrize("name", some(WAYS))
def test_two_ranks_answer_as_one_process(alone: Executor, two_ranks: Executor, name: str) -> None:
    expected, answers = run(alone, WAYS[name]), run(two_ranks, WAYS[name])
    assert tokens_of(answers) == tokens_of(expected)
    for field in ("logprobs", "prompt_logprobs"):
        found, wanted = parts_of(answers, field), parts_of(expected, field)
        for key, own in found.items():
            assert [each.token_ids for each in own] == [each.token_ids for each in wanted[key]]
            for each, reference in zip(own, wanted[key], strict=True):
                assert each.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
        assert sum(map(len, found.values())) > 100


def test_two_ranks_have_their_parts_of_adapters(
    alone: Executor, two_ranks: Executor, checkpoint: Path, tmp_path: Path
) -> None:
    """There are more than slots, and than the host holds: they are put, and read, again."""
    adapters: list[Adapter | None] = [
        Adapter(f"a{n}", str(write_adapter(tmp_path / f"a{n}", weight_shapes(checkpoint), n)), n)
        for n in range(6)
    ]
    chosen = [*adapters, None]
    plain = requests()[:60]
    asked = [
        msgspec.structs.replace(r, adapter=chosen[n * n // 3 % len(chosen)])
        for n, r in enumerate(plain)
    ]
    expected = tokens_of(run(alone, Way(overlap=True), asked))
    assert expected != tokens_of(run(alone, Way(overlap=True), plain))
    for way in (Way(overlap=True), Way(drafts=3)):
        assert tokens_of(run(two_ranks, way, asked)) == expected


def test_an_adapter_without_files_fails_alone(two_ranks: Executor, tmp_path: Path) -> None:
    read = two_ranks.read_adapter(Adapter("gone", str(tmp_path / "gone"), 99))
    with pytest.raises(ModelError, match="there is no file"):
        read.result()
    assert draw_of(two_ranks, [5, 17, 80, 3])


def draw_of(executor: Executor, tokens: list[int], start: int = 0) -> Any:
    spec = SampleSpec(
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=4), start + len(tokens)
    )
    sequence = ScheduledSequence(1, tokens, start, [4, 2], (spec,))
    return execute(executor, SchedulerOutput(0, (sequence,))).sampled[1]


def test_a_masked_draw_is_the_same_on_every_rank(alone: Executor, two_ranks: Executor) -> None:
    """A token that only the device knows has the same continuation as the allowed token."""
    mask, drawn = bytes([0, 1 << 5]), []
    greedy = SamplingParams(max_tokens=1, temperature=0.0, logprobs=4)
    for executor in (alone, two_ranks):
        masked, free = SampleSpec(greedy, 4, masks=(mask,)), SampleSpec(greedy, 5)
        steps = (
            ScheduledSequence(1, [5, 17, 80, 3], 0, [4], (masked,)),
            ScheduledSequence(1, [], 4, [4], (free,), takes_pending=True),
        )
        outputs = [execute(executor, SchedulerOutput(0, (step,))).sampled[1][0] for step in steps]
        assert outputs[0].token_id == 13
        drawn.append(outputs[1])
    assert drawn[0].token_id == drawn[1].token_id
    assert drawn[1].logprobs.logprobs == pytest.approx(drawn[0].logprobs.logprobs, abs=1e-5)


def test_kv_of_ranks_is_that_of_one_process(alone: Executor, two_ranks: Executor) -> None:
    check_kv_moves(alone, two_ranks)


def check_kv_moves(alone: Any, two_ranks: Any) -> None:
    prompt = [5, 17, 80, 3, 9, 60, 2, 11, 33, 4]
    expected = draw_of(alone, prompt), draw_of(alone, [7], len(prompt))
    draw_of(two_ranks, prompt)
    copies = [executor.read_kv([4, 2], len(prompt)) for executor in (alone, two_ranks)]
    numbers = [torch.frombuffer(copy, dtype=torch.float32) for copy in copies]
    torch.testing.assert_close(numbers[1], numbers[0])
    assert alone.kv_shape == two_ranks.kv_shape
    for executor, copy in zip((two_ranks, alone), copies, strict=True):
        spec = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0, logprobs=4), 11)
        sequence = ScheduledSequence(1, [7], len(prompt), [9, 8], (spec,))
        step = SchedulerOutput(0, (sequence,), kv_loads=(KvLoad((9, 8), (copy,)),))
        found = execute(executor, step).sampled[1]
        assert [one.token_id for one in found] == [one.token_id for one in expected[1]]
        wanted = expected[1][0].logprobs.logprobs
        assert found[0].logprobs.logprobs == pytest.approx(wanted, abs=1e-5)


def test_a_rank_without_memory_fails_the_read_alone(
    two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> memoryview:
        raise DeviceMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(two_ranks._runner, "read_kv", refuse)
        with pytest.raises(DeviceMemoryError, match="no memory to copy"):
            two_ranks.read_kv([4], 2)
    assert two_ranks.read_kv([4], 2).nbytes == 2 * 2 * 2 * 2 * 12 * 4


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_and_wake_together(two_ranks: Executor, level: int) -> None:
    prompt = [5, 17, 80, 3]
    before = draw_of(two_ranks, prompt), draw_of(two_ranks, [7], len(prompt))
    two_ranks.sleep(level)
    two_ranks.wake(frozenset({"weights"}))
    two_ranks.wake(frozenset({"kv_cache"}))
    assert draw_of(two_ranks, [7], len(prompt)) != before[1]  # after a context of zeros
    assert (draw_of(two_ranks, prompt), draw_of(two_ranks, [7], len(prompt))) == before


def test_a_size_that_divides_no_heads_is_refused(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 3 .* 4 heads, 2 KV.* 1, 2 or 4$"
    ):
        build_executor(config_of(checkpoint, 3))


def test_a_cache_that_is_too_small_is_refused_before_ranks_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.Ranks, "start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override to 32"):
        build_executor(config_of(checkpoint, 2, num_blocks_override=1))


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", Shard(1, 2)) == torch.device("cuda", 1)
    assert choose_device("cpu", Shard(1, 4)) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"torch sees 2 .* lower it to 2"):
        choose_device("auto", Shard(3, 4))


@pytest.mark.parametrize(("room", "other", "least"), [(100, 70, 70), (70, 100, 70), (None,) * 3])
def test_ranks_agree_on_the_blocks_of_the_least_room(
    room: int | None, other: int | None, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 chooses, from what the fullest device has, and rank 1 takes its choice."""
    seen: list[int | None] = []

    def reduce(tensor: torch.Tensor, op: object) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.clamp_(max=tensor if other is None else torch.tensor(other))

    def choose(room: int | None) -> int:
        seen.append(room)
        return 12

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        assert (source, seen) == (0, [least])
        tensor.fill_(12)

    monkeypatch.setattr(ranks.distributed, "all_reduce", reduce)
    monkeypatch.setattr(ranks.distributed, "broadcast", broadcast)
    device = torch.device("cpu")
    assert agree_on_blocks(room, choose, Shard(0, 2), device) == 12
    assert agree_on_blocks(room, choose, Shard(1, 2), device) == 12
    assert seen == [least]
