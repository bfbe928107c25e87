"""Flags in vLLM's spelling resolve to one frozen configuration, or to one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.config import ServeConfig
from worker.errors import ConfigError
from worker.flags import build_parser, find_model, resolve
from worker.tokenizer import sim
from worker.tokenizer.checkpoint import Checkpoint

TINY = Checkpoint(Path("/models/tiny.Q4_1.gguf"), "tiny", 2048, 49152, (2, 0), None, "", "")


def resolved(*flags: str, checkpoint: Checkpoint | None = TINY) -> ServeConfig:
    """The configuration of a command line."""
    return resolve(build_parser().parse_args(flags), checkpoint, {})


def test_defaults_come_from_the_model() -> None:
    """Length, vocabulary, names and end tokens are the checkpoint's."""
    config = resolved()
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.api.served_model_names == ("tiny",)
    assert config.api.accepted_model_names == ("/models/tiny.Q4_1.gguf",)
    assert config.api.max_model_len == config.engine.scheduler.max_model_len == 2048
    assert config.engine.eos_token_ids == (2, 0)
    assert config.engine.model_path == "/models/tiny.Q4_1.gguf"


def test_the_simulator_needs_no_model() -> None:
    """Without a checkpoint the simulator speaks its own vocabulary."""
    config = resolved("--engine", "sim", checkpoint=None)
    assert config.api.served_model_names == ("sim",)
    assert config.api.vocab_size == sim.VOCAB_SIZE
    words = (config.engine.sim.first_word_id, config.engine.sim.num_words)
    assert words == (sim.FIRST_WORD_ID, sim.NUM_WORDS)
    assert config.engine.model_path is None


def test_the_simulator_can_speak_a_models_vocabulary() -> None:
    """With a model the drawn ids are ordinary tokens of it."""
    config = resolved("--engine", "sim").engine.sim
    assert 0 < config.first_word_id < config.first_word_id + config.num_words <= 49152


def test_flags_reach_the_engine() -> None:
    """Each flag lands in its field, milliseconds as seconds."""
    config = resolved(
        *("--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "64"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--no-enable-prefix-caching"),
        *("--long-prefill-token-threshold", "128", "--max-num-queued-reqs", "9", "--seed", "3"),
        *("--num-threads", "2", "--dtype", "float32", "--served-model-name", "a", "b"),
        *("--sim-prefill-tokens-per-second", "1000", "--sim-decode-base-ms", "5"),
        *("--sim-decode-per-seq-ms", "0.5", "--sim-time-scale", "0", "--shutdown-timeout", "7"),
    )
    engine = config.engine
    assert (engine.block_size, engine.num_blocks_override, engine.num_threads) == (32, 64, 2)
    assert (engine.dtype, engine.enable_prefix_caching) == ("float32", False)
    assert engine.scheduler.max_num_seqs == config.api.max_num_seqs == 4
    assert engine.scheduler.max_num_batched_tokens == 256
    assert engine.scheduler.long_prefill_token_threshold == 128
    assert engine.scheduler.max_model_len == config.api.max_model_len == 512
    assert config.api.max_num_queued_reqs == 9
    assert (config.api.served_model_names, config.api.seed) == (("a", "b"), 3)
    assert engine.sim.prefill_tokens_per_second == 1000
    assert (engine.sim.decode_base_seconds, engine.sim.time_scale) == (0.005, 0)
    assert engine.sim.decode_per_sequence_seconds == 0.0005
    assert config.shutdown_timeout_seconds == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "4096"], "context of 2048"),
        (["--port", "70000"], "--port"),
        (["--max-body-bytes", "999999999"], "--max-body-bytes"),
    ],
)
def test_what_cannot_work_is_one_sentence(flags: list[str], message: str) -> None:
    """The error names the flag."""
    with pytest.raises(ConfigError, match=message):
        resolved(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "2"],
        ["--max-model", "10"],
        ["--max-num-seqs", "0"],
        ["--dtype", "int8"],
        ["--block-size", "24"],
        ["--sim-prefill-tokens-per-second", "0"],
        ["--sim-decode-base-ms", "-1"],
        ["--port", "x"],
    ],
)
def test_unknown_flags_and_values_are_refused(flags: list[str]) -> None:
    """A vLLM flag that is not built, an abbreviation, or a bad value exits with status 2."""
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(flags)
    assert caught.value.code == 2


def test_the_model_is_found_by_flag_environment_or_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag wins, then the environment, then the cached default; else one sentence."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parse = build_parser().parse_args
    assert find_model(parse(["--model", "x"]), {"POINTSMAN_MODEL": "y"}) == Path("x")
    assert find_model(parse([]), {"POINTSMAN_MODEL": "y"}) == Path("y")
    assert find_model(parse(["--engine", "sim"]), {"POINTSMAN_MODEL": "y"}) is None
    with pytest.raises(ConfigError, match="--model"):
        find_model(parse([]), {})
    cached = tmp_path / ".cache/pointsman/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert find_model(parse([]), {}) == cached
    moved = tmp_path / "moved"
    with pytest.raises(ConfigError, match="moved"):
        find_model(parse([]), {"POINTSMAN_CACHE": str(moved)})
    (moved / "models").mkdir(parents=True)
    (moved / "models" / cached.name).touch()
    found = find_model(parse([]), {"POINTSMAN_CACHE": str(moved)})
    assert found == moved / "models" / cached.name
