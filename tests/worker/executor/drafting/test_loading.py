"""The configured drafter starts with the executor, or the error names the reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.model.whole_engine import torch_config
from tests.support.worker.draft_bench import tiny_head
from worker.config import EngineConfig, SpeculativeConfig
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
from worker.models.loader import load_model
from worker.types import Draw, SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

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
    for path in (file, tiny_checkpoint):
        chosen = SpeculativeConfig("eagle", 4, model=str(path))
        message = f"^--speculative-config: model {path}.*`pointsman train-draft` makes one"
        with pytest.raises(ModelError, match=message):
            build_executor(config(tiny_checkpoint, chosen))


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
