"""The simulator's settings have the same names on the command line and at run time."""

import dataclasses
import re
from pathlib import Path

import pytest

from worker.cli.flags import build_parser
from worker.errors import ConfigError
from worker.sim import faults
from worker.sim.config import FaultConfig, SimConfig
from worker.sim.flags import fault_config, sim_config
from worker.sim.latency import Capacity, build_model
from worker.sim.settings import (
    BY_NAME,
    PRESETS,
    SETTINGS,
    apply,
    format_duration,
    parse_duration,
    show,
)
from worker.sim.tokens import OUTPUT_LENGTHS
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput


def configured(*flags: str) -> SimConfig:
    options = build_parser().parse_args(["--engine", "sim", *flags])
    return sim_config(options, None, (1281,))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("1.5s", 1.5),
        ("750us", 0.00075),
        ("3ns", 3e-9),
        ("1m30s", 90.0),
        ("2h", 7200.0),
        ("12", 0.012),
        (12, 0.012),
        (0.5, 0.0005),
        ("0", 0.0),
    ],
)
def test_durations_are_go_strings_or_milliseconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "10 ms", "5x", "ms", "1s2", True, None, [], "nan"])
def test_invalid_durations_are_none(text: object) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 2.5e-7, 0.00025, 0.012, 0.1, 1.0, 90.5, 7200.0])
def test_a_formatted_duration_parses_to_itself(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-11)


def test_every_field_of_a_model_has_a_setting() -> None:
    """The vocabulary or the start decides the excepted fields."""
    fields = {field.name for field in dataclasses.fields(SimConfig)}
    fixed = {"seed", "mode", "first_word_id", "num_words", "vocab_size"}
    fixed |= {"end_token_id", "turn_token_id"}
    assert {setting.field for setting in SETTINGS} == fields - fixed
    assert len(BY_NAME) == len(SETTINGS)


def test_shown_settings_parse_to_the_same_configuration() -> None:
    config = apply(SimConfig(), PRESETS["8b-h100-balanced-per-token"])
    assert apply(SimConfig(), show(config)) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"time-to-first-tokn": 1}, "unknown setting 'time-to-first-tokn'"),
        ({"inter-token-latency": "soon"}, "inter-token-latency must be a duration"),
        ({"inter-token-latency": -1}, "inter-token-latency must be at least 0"),
        ({"time-factor-under-load": 0.5}, "time-factor-under-load must be at least 1"),
        ({"speedup-ratio": 0}, "speedup-ratio must be above 0"),
        ({"time-scale": 1e308}, "time-scale must be at most 1e"),
        ({"time-scale": 10**400}, "time-scale must be a number"),
        ({"inter-token-latency": 1e300}, "inter-token-latency must be at most 86400s"),
        ({"prefill-tokens-per-second": "9"}, "prefill-tokens-per-second must be a number"),
        ({"mean-output-tokens": float("inf")}, "mean-output-tokens must be a number"),
        ({"latency-model": "quantum"}, "latency-model must be one of linear, constant"),
        (
            {"inter-token-latency": "10ms", "inter-token-latency-std-dev": "4ms"},
            "inter-token-latency-std-dev may be 30% of inter-token-latency at most",
        ),
    ],
)
def test_wrong_settings_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply(SimConfig(), given)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid_and_take_time(name: str) -> None:
    config = configured("--sim-preset", name)
    spec = SampleSpec(SamplingParams(9), 256, num_prompt=256)
    step = SchedulerOutput(1, (ScheduledSequence(1, [1] * 256, 0, [0], (spec,)),))
    assert 0.015 < build_model(config, Capacity()).seconds(step) < 0.4


def test_the_published_profiles_have_the_published_numbers() -> None:
    per_token = configured("--sim-preset", "8b-h100-balanced-per-token")
    assert per_token.latency_model == "llm-d"
    assert per_token.prefill_overhead_seconds == pytest.approx(0.030)
    assert per_token.prefill_per_token_seconds == pytest.approx(0.00025)
    assert per_token.prefill_std_seconds == pytest.approx(0.005)
    assert per_token.inter_token_latency_seconds == pytest.approx(0.012)
    assert per_token.time_factor_under_load == 2.0
    constant = configured("--sim-preset", "8b-h100-balanced-constant")
    assert constant.time_to_first_token_seconds == pytest.approx(0.1)
    assert constant.time_to_first_token_std_seconds == pytest.approx(0.02)


def test_flags_override_the_preset_which_overrides_the_defaults() -> None:
    config = configured(
        *("--sim-preset", "70b-h100-tp8-throughput-constant"),
        *("--sim-inter-token-latency", "30ms", "--sim-time-scale", "0.1"),
        *("--sim-output-length", "gaussian", "--sim-output-tokens-std", "20"),
    )
    assert config.inter_token_latency_seconds == pytest.approx(0.03)
    assert config.time_to_first_token_seconds == pytest.approx(0.2)
    assert (config.time_scale, config.output_length) == (0.1, "gaussian")
    assert config.output_tokens_std == 20.0
    assert config.mean_output_tokens == SimConfig().mean_output_tokens


@pytest.mark.parametrize(
    "flags",
    [
        ["--sim-preset", "b200"],
        ["--sim-inter-token-latency", "x"],
        ["--sim-mode", "poem"],
        ["--sim-time-factor-under-load", "0"],
        ["--sim-startup-duration", "-1s"],
    ],
)
def test_wrong_flags_exit_with_status_2(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        configured(*flags)
    assert caught.value.code == 2


def test_a_std_without_a_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="time-to-first-token-std-dev"):
        configured("--sim-time-to-first-token-std-dev", "5ms")


def test_the_simulator_or_a_flag_enables_faults() -> None:
    def built(*flags: str, **environment: str) -> FaultConfig | None:
        return fault_config(build_parser().parse_args(flags), environment)

    assert built() is None
    assert built("--enable-fault-injection", POD_NAME="p") == FaultConfig()
    simulated = built("--engine", "sim", "--sim-startup-duration", "2s")
    assert simulated == FaultConfig(startup_seconds=2.0)
    named = built("--engine", "sim", "--port", "8123", POD_NAME="p-0", POD_NAMESPACE="llm")
    assert named is not None
    assert dict(named.reply_headers) == {
        "x-inference-pod": "p-0",
        "x-inference-port": "8123",
        "x-inference-namespace": "llm",
    }


# ---- the documentation ----

PAGE = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
EXAMPLES = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("body", EXAMPLES)
def test_documented_examples_have_an_effect(body: str) -> None:
    update = faults.parse_update(faults.Faults(), body.encode(), frozenset(BY_NAME))
    changed = apply(SimConfig(), update.settings)
    assert update.faults != faults.Faults() or update.crash or changed != SimConfig()


def test_every_setting_and_value_is_documented() -> None:
    names = {*faults.show(faults.Faults()), "hang", "crash", *BY_NAME} - {
        "latency-model",
        "time-scale",
    }
    values = {*faults.FAILURES, *faults.METRICS_PAGES, *faults.SHAPES, *OUTPUT_LENGTHS, *PRESETS}
    missing = sorted(
        name for name in names | values if f"`{name}`" not in PAGE and not name.endswith("-std-dev")
    )
    assert missing == []
    assert len(EXAMPLES) >= 5
