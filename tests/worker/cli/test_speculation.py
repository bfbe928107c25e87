"""`--speculative-config` is vLLM's, and what it cannot say is refused by name."""

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.cli.flags import build_parser, resolve
from worker.cli.speculation import LOOKUP, parse
from worker.cli.table import FLAGS
from worker.config import SpeculativeConfig
from worker.errors import ConfigError
from worker.tokenizer.checkpoint import Checkpoint

TINY = Checkpoint(Path("/models/tiny.gguf"), "tiny", 2048, 49152, (2,), None, "", "")
NGRAM = {"method": "ngram", "num_speculative_tokens": 8}
TABLE = "num_speculative_tokens_per_batch_size"


def resolved(config: object, *flags: str, name: str = "--speculative-config") -> Any:
    text = config if isinstance(config, str) else json.dumps(config)
    return resolve(build_parser().parse_args([name, text, *flags]), TINY, {})


def test_a_model_looks_drafts_up_by_default_and_the_simulator_makes_none() -> None:
    by_default = resolve(build_parser().parse_args([]), TINY, {})
    assert by_default.engine.speculative == parse(json.loads(LOOKUP))
    simulated = resolve(build_parser().parse_args(["--engine", "sim"]), None, {})
    for config in (resolved("null"), simulated):
        assert (config.engine.speculative, config.api.num_speculative_tokens) == (None, None)


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
def test_a_configuration_reaches_the_engine_and_the_front_end(flag: str) -> None:
    config = resolved(NGRAM, name=flag)
    assert config.engine.speculative == SpeculativeConfig("ngram", 8)
    assert config.api.num_speculative_tokens == 8


def test_every_field_can_be_given() -> None:
    values: dict[str, dict[str, Any]] = {
        "ngram": {**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "suffix": {
            "method": "suffix",
            "num_speculative_tokens": 16,
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 2.5,
            "suffix_decoding_min_token_prob": 0.2,
            "enable_adaptive_verification": False,
            TABLE: [[1, 4, 16], [5, 8, 2], [9, 128, 0]],
        },
        "eagle": {
            "method": "eagle",
            "num_speculative_tokens": 3,
            "model": "/heads/a.safetensors",
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "block",
        },
    }
    given_names = set()
    for method, given_values in values.items():
        config = parse({**given_values, "revision": None, "draft_tensor_parallel_size": 1})
        assert config.method == method
        for name, value in given_values.items():
            found = getattr(config, name)
            assert (list(map(list, found)) if name == TABLE else found) == value
        given_names |= set(given_values)
    assert given_names == {field.name for field in fields(SpeculativeConfig)}


@pytest.mark.parametrize(
    ("given_lengths", "expected"),
    [({}, (5, 5)), ({"min": 3}, (3, 3)), ({"max": 7}, (7, 7)), ({"min": 1, "max": 4}, (1, 4))],
)
def test_a_missing_lookup_length_follows_the_other_one(
    given_lengths: dict[str, int], expected: tuple[int, int]
) -> None:
    named = {f"prompt_lookup_{name}": value for name, value in given_lengths.items()}
    config = parse({**NGRAM, **named})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_the_method_follows_from_the_model() -> None:
    """A model is a draft model, unless it is the name of a lookup, which vLLM allows."""
    config = parse({"model": "~/small.gguf"})
    assert (config.method, config.model) == ("draft_model", str(Path("~/small.gguf").expanduser()))
    for model in ("ngram", "[ngram]"):
        assert parse({"model": model, "num_speculative_tokens": 2}).method == "ngram"
    assert parse({"model": "ngram", **NGRAM}).model is None


def test_the_number_of_drafts_depends_on_the_method() -> None:
    """A suffix drafts as many tokens as its tree is deep, a model a few."""
    assert parse({"method": "suffix"}).num_speculative_tokens == 24
    deep = {"method": "suffix", "suffix_decoding_max_tree_depth": 500}
    assert parse(deep).num_speculative_tokens == 128
    head = parse({"method": "eagle"})
    assert (head.num_speculative_tokens, head.model) == (5, None)
    assert parse({"model": "small.gguf"}).num_speculative_tokens == 5


def test_the_path_of_a_model_becomes_absolute() -> None:
    """The engine process has another working directory."""
    assert parse({"model": "small.gguf"}).model == str(Path.cwd() / "small.gguf")


def test_an_unsupported_switch_may_be_off() -> None:
    off = {"parallel_drafting": False, "use_heterogeneous_vocab": None}
    assert parse({**NGRAM, **off}) == parse(NGRAM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "ngrams"}, "unknown method 'ngrams'; supported are ngram, suffix"),
        ({"method": None}, "method is missing; supported are ngram"),
        ({"method": "ngram_gpu"}, "use ngram"),
        ({"method": "deepseek_mtp"}, "needs a model with such layers"),
        ({"method": "medusa"}, "'medusa' is not supported"),
        ({"method": 7}, "unknown method 7"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 0}, r"must be an integer in \[1, 128\], got 0"),
        ({"num_speculative_tokens": 129}, r"must be an integer in \[1, 128\], got 129"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens must be an integer"),
        ({"num_speculative_token": 5}, "did you mean num_speculative_tokens?"),
        ({"colour": "red"}, "unknown field 'colour'; known are method, num_speculative_tokens"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "5 is more than prompt_lookup_max 4"),
        ({"model": "x.gguf"}, "model is of method draft_model and eagle and eagle3, not of ng"),
        ({"suffix_decoding_max_tree_depth": 3}, "is of method suffix, not of ngram"),
        ({"draft_sample_method": "gumbel"}, "is of method draft_model and eagle and eagle3, not"),
        ({"draft_sample_method": "hot"}, "must be one of greedy, gumbel, probabilistic"),
        ({"rejection_sample_method": "synthetic"}, "always the model's own; supported are stan"),
        ({"rejection_sample_method": []}, "must be one of standard, block"),
        ({"synthetic_acceptance_length": 2.5}, "synthetic_acceptance_length is not supported"),
        ({"parallel_drafting": True}, "parallel_drafting is not supported"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1"),
        ({"enable_adaptive_verification": 1}, "must be true or false"),
        ({TABLE: {"1": 2}}, "must be a list of"),
        ({TABLE: [[1, 2]]}, "must be a list of"),
        ({TABLE: [[1, 2, 3.0]]}, "must be a list of"),
        ({TABLE: [[2, 4, 1]]}, "must begin with batch size 1, not 2"),
        ({TABLE: [[1, 4, 2], [4, 8, 1]]}, "without overlaps"),
        ({TABLE: [[1, 4, 2], [9, 8, 1]]}, "in order of batch size"),
        ({TABLE: [[1, 4, 9]]}, r"0 to num_speculative_tokens \(8\) drafts, not 9"),
        ({TABLE: [[1, 4, -1]]}, "not -1"),
    ],
)
def test_an_invalid_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--speculative-config: .*{message}"):
        resolved({**NGRAM, **changes})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "draft_model"}, "needs model"),
        ({"method": "eagle3"}, "eagle3 needs model, the directory of a published head"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, r"a number in \[0, 1\]"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "a number of 0 or more"),
        ({"method": "eagle", "model": ""}, "model must be the path"),
        (
            {"method": "eagle", "rejection_sample_method": "block"},
            "'block' is of draft_sample_method 'probabilistic', not of 'greedy'.*leave it out",
        ),
        (
            {
                "model": "small.gguf",
                "draft_sample_method": "gumbel",
                "rejection_sample_method": "block",
            },
            "'block' is of draft_sample_method 'probabilistic', not of 'gumbel'",
        ),
        ("[1]", "not a JSON object"),
        ("{", "not a JSON object"),
    ],
)
def test_other_methods_and_broken_json_are_refused(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5},
            r"model 'Qwen/Qwen3-0\.6B' is not a file or directory here; download it and give its",
        ),
        ({"method": "eagle", "model": "someone/EAGLE"}, "'someone/EAGLE' is not .* train-draft"),
        ({"method": "eagle3", "model": "someone/EAGLE3"}, "'someone/EAGLE3' is not .* its path"),
    ],
)
def test_a_missing_model_is_an_error_before_anything_is_loaded(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--speculative-config: .*{message}"):
        resolved(config)
    with pytest.raises(ConfigError, match="--engine sim has no model"):
        resolved(config, "--engine", "sim")


def test_an_existing_model_is_accepted(tmp_path: Path) -> None:
    """The loader checks the contents of a file or directory."""
    file = tmp_path / "small"
    file.touch()
    for path in (tmp_path, file):
        assert resolved({"model": str(path)}).engine.speculative.model == str(path)


@pytest.mark.parametrize("config", [{"method": "eagle"}, {"model": "small.gguf"}])
def test_the_simulator_refuses_methods_with_a_model(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--engine sim has no model .* use ngram or suffix"):
        resolved(config, "--engine", "sim")
    assert resolved(NGRAM, "--engine", "sim").engine.speculative == parse(NGRAM)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
NAMES = st.sampled_from([*(field.name for field in fields(SpeculativeConfig)), "quantization", "x"])


# What is slow is hypothesis itself, when it lists all characters for the first time.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=st.dictionaries(NAMES, JSON, max_size=5))
def test_any_object_is_a_configuration_or_an_error(config: dict[str, Any]) -> None:
    with suppress(ConfigError):
        parsed = parse(config)
        assert 1 <= parsed.num_speculative_tokens <= 128
        assert 1 <= parsed.prompt_lookup_min <= parsed.prompt_lookup_max


def test_help_shows_the_default() -> None:
    assert LOOKUP in " ".join(FLAGS.split())
