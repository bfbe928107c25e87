"""The configured drafter starts with the executor, or the error names the reason."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tests.depth import by_depth
from tests.support.model.eagle_heads import LAYOUTS, write_head
from tests.support.model.whole_engine import outputs_of, tokens_of, torch_config
from tests.support.worker.draft_bench import tiny_head
from worker.config import EngineConfig, SpeculativeConfig
from worker.engine.messages import AddRequest
from worker.engine.process.build import build_core
from worker.errors import ConfigError, ModelError
from worker.executor.drafting.loading import (
    HeadNetwork,
    ModelNetwork,
    drafter_bytes_per_token,
    network_loader,
)
from worker.executor.interface import execute
from worker.executor.kv_cache import choose_num_blocks
from worker.executor.start import build_executor
from worker.models.config import from_hf
from worker.models.eagle_head import load_eagle_head
from worker.models.loader import load_model
from worker.types import (
    Draw,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SpeculationStats,
)

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def config(path: Path, speculative: SpeculativeConfig | None) -> EngineConfig:
    return torch_config(path, speculative=speculative)


def test_a_model_drafts_for_itself(tiny_checkpoint: Path) -> None:
    chosen = SpeculativeConfig("draft_model", 4, model=str(tiny_checkpoint))
    executor, num_blocks = build_executor(config(tiny_checkpoint, chosen))
    assert num_blocks == 32
    spec = SampleSpec(GREEDY, 5)
    prompt = ScheduledSequence(1, [5, 17, 80, 3, 9], 0, [4, 2], (spec,), num_to_draft=4)
    first = execute(executor, SchedulerOutput(0, (prompt,)))
    drafts = first.drafts[1]
    assert (drafts.position, len(drafts.token_ids)) == (6, 4)
    tokens = [first.sampled[1][0].token_id, *drafts.token_ids]
    spec = SampleSpec(GREEDY, 6)
    run = ScheduledSequence(1, tokens, 5, [4, 2], (spec,), num_drafts=4)
    draws = execute(executor, SchedulerOutput(1, (run,))).sampled[1]
    assert draws[:-1] == tuple(Draw(token) for token in drafts.token_ids)


def test_other_methods_need_nothing_on_the_device(tiny_checkpoint: Path) -> None:
    assert network_loader(None, 64) is None
    assert network_loader(SpeculativeConfig("ngram", 4), 64) is None
    assert network_loader(SpeculativeConfig("suffix", 4), 64) is None


def test_a_draft_model_of_another_vocabulary_is_refused(
    tiny_checkpoint: Path, make_checkpoint: Callable[..., Path]
) -> None:
    other = SpeculativeConfig("draft_model", 4, model=str(make_checkpoint(seed=4, vocab_size=90)))
    with pytest.raises(ConfigError, match="90 tokens, the target one of 96"):
        build_executor(config(tiny_checkpoint, other))
    with pytest.raises(ConfigError, match="needs model"):
        build_executor(config(tiny_checkpoint, replace(other, model=None)))
    missing = "^--speculative-config: model nowhere: no such file or directory"
    with pytest.raises(ModelError, match=missing):
        build_executor(config(tiny_checkpoint, replace(other, model="nowhere")))


def test_a_missing_head_is_an_error_that_names_the_fix(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="pointsman train-draft"):
        build_executor(config(tiny_checkpoint, SpeculativeConfig("eagle", 4)))
    missing = SpeculativeConfig("eagle", 4, model="nowhere.safetensors")
    with pytest.raises(ModelError, match=r"^--speculative-config: model nowhere\.safetensors"):
        build_executor(config(tiny_checkpoint, missing))


def test_a_file_that_is_no_head_is_refused_with_the_field_and_the_fix(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(64) + b"\xff" * 64)
    for path, reason in (
        (file, "`pointsman train-draft` makes one"),
        (tiny_checkpoint, "num_hidden_layers is 2, but 1 in a head"),
    ):
        chosen = SpeculativeConfig("eagle", 4, model=str(path))
        message = f"^--speculative-config: model {path}.*{reason}"
        with pytest.raises(ModelError, match=message):
            build_executor(config(tiny_checkpoint, chosen))


@pytest.fixture(scope="module")
def deep_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(seed=1, num_hidden_layers=6)


def answers(asked: EngineConfig) -> tuple[dict[str, list[int]], SpeculationStats]:
    """Greedy and seeded answers to prompts that do not all fit into the blocks at once."""
    core, _ = build_core(asked, time.monotonic)
    rng = Random(2)
    requests = [
        AddRequest(str(index), [rng.randrange(96) for _ in range(30 + index)], params, index / 8)
        for index in range(5)
        for params in [SamplingParams(max_tokens=24, temperature=0.8 * (index % 2), seed=index)]
    ]
    found = tokens_of(outputs_of(core, requests, at_once=1))
    core.shutdown()
    return found, core._scheduler.stats().speculation


WAYS = by_depth(
    [("eagle", "torch"), ("eagle3", "auto")],
    [(layout, backend) for layout in ("eagle", "eagle3") for backend in ("auto", "torch")],
)


@pytest.mark.parametrize(("layout", "backend"), WAYS)
def test_a_published_head_changes_no_answer(
    layout: str,
    backend: str,
    deep_checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = from_hf("", json.loads((deep_checkpoint / "config.json").read_text()))
    path = str(write_head(tmp_path, LAYOUTS[layout], target))
    drafts = SpeculativeConfig(
        LAYOUTS[layout].method, 4, model=path, enable_adaptive_verification=False
    )
    plain = replace(
        config(deep_checkpoint, None), num_blocks_override=16, attention_backend=backend
    )
    expected, _ = answers(plain)
    found, stats = answers(replace(plain, speculative=drafts))
    assert found == expected
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    assert "drafting failed" not in caplog.text


def test_a_published_head_is_refused_with_the_field(
    deep_checkpoint: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    target = from_hf("", json.loads((deep_checkpoint / "config.json").read_text()))
    path = str(write_head(tmp_path, LAYOUTS["eagle3"], target))
    for method, checkpoint, message in (
        ("eagle", deep_checkpoint, "an EAGLE-3 head: set method to eagle3"),
        ("eagle3", tiny_checkpoint, "are not layers of a model of 2"),
    ):
        chosen = SpeculativeConfig(method, 4, model=path)
        with pytest.raises(ModelError, match=f"^--speculative-config: model {path}.*{message}"):
            build_executor(config(checkpoint, chosen))


def test_a_head_stores_one_state_of_its_own_size(deep_checkpoint: Path, tmp_path: Path) -> None:
    target = load_model(deep_checkpoint, torch.float32, CPU)
    path = write_head(tmp_path, LAYOUTS["eagle3, another size"], target.config)
    network = HeadNetwork(load_eagle_head(path, target, "eagle3"))
    per_token = drafter_bytes_per_token(network, target, torch.float32)
    assert per_token == (2 * 2 * 8 + 40) * 4 + 5


def test_blocks_have_room_for_the_drafters_data(tiny_checkpoint: Path) -> None:
    target = load_model(tiny_checkpoint, torch.float32, CPU)
    single, half = torch.float32, torch.bfloat16
    per_token = drafter_bytes_per_token(ModelNetwork(target), target, single)
    assert per_token == target.config.kv_elements_per_token * 4 + 5
    head, rounded = (
        drafter_bytes_per_token(HeadNetwork(tiny_head(target)), target, kind)
        for kind in (single, half)
    )
    elements = target.config.kv_elements_per_token // 2
    assert head == (elements + target.config.hidden_size) * 4 + 5
    assert head - rounded == elements * 2
    memory = replace(
        config(tiny_checkpoint, None), num_blocks_override=None, kv_cache_memory_bytes=1 << 20
    )
    without, with_it = (
        choose_num_blocks(memory, target.config, torch.float32, CPU, None, extra)
        for extra in (0, per_token)
    )
    assert with_it == (1 << 20) // (16 * (2 * (per_token - 5) + 5))
    assert with_it < without
