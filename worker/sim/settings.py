"""The simulator's settings by name: flags with the prefix `--sim-`, and keys of `/admin/config`
while it runs. Names are those of the llm-d inference simulator where it has the setting. Pure.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from worker.errors import ConfigError
from worker.sim.config import SimConfig
from worker.sim.latency import MAX_STD_SHARE, MODELS
from worker.sim.tokens import OUTPUT_LENGTHS

MODES = ("random", "echo")
# No test waits longer, and no clock or timer overflows.
MAX_SECONDS = 86_400.0
MAX_FACTOR = 1e9
MAX_COUNT = (1 << 53) - 1  # exact in every reader of JSON

# The number of units in a second: exact for those below a second.
_UNITS = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0, "m": 1 / 60, "h": 1 / 3600}
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)")


class Kind(Enum):
    DURATION = "duration"  # "250ms", "1m30s"; a number is milliseconds
    NUMBER = "number"
    COUNT = "whole number"
    WORD = "word"
    WORDS = "words"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name, its field of the configuration, its help text and its valid values.

    A number is between `minimum` (excluded if `is_open`) and `maximum` (None: a day for a
    duration, else `MAX_FACTOR`). A word is one of `choices`.
    """

    name: str
    field: str
    text: str = ""
    kind: Kind = Kind.DURATION
    minimum: float = 0.0
    is_open: bool = False
    choices: tuple[str, ...] = ()
    maximum: float | None = None

    def parse(self, value: Any) -> Any:
        """Parse the field's value. Raise `ConfigError` that names the setting."""
        match self.kind:
            case Kind.WORD:
                if not isinstance(value, str) or value not in self.choices:
                    raise self._wrong(f"one of {', '.join(self.choices)}", value)
            case Kind.WORDS:
                is_list = isinstance(value, list)
                if not is_list or any(word not in self.choices for word in value):
                    raise self._wrong(f"a list of {', '.join(self.choices)}", value)
                return tuple(value)
            case Kind.TEXT:
                if not isinstance(value, str) or not value.isascii() or not value.isprintable():
                    raise self._wrong("printable ASCII", value)
            case Kind.COUNT:
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                if not is_whole or not 0 <= value <= MAX_COUNT:
                    raise self._wrong(f"a whole number of 0 to {MAX_COUNT}", value)
            case _:
                return self._number(value)
        return value

    def show(self, config: object) -> object:
        """Return the value in a configuration, in the form that `parse` takes."""
        value = getattr(config, self.field)
        return format_duration(value) if self.kind is Kind.DURATION else value

    def _number(self, value: object) -> float:
        is_duration = self.kind is Kind.DURATION
        number = parse_duration(value) if is_duration else _number(value)
        if number is None:
            raise self._wrong("a duration like 250ms" if is_duration else "a number", value)
        if number < self.minimum or (self.is_open and number == self.minimum):
            raise self._wrong(f"{'above' if self.is_open else 'at least'} {self.minimum:g}", value)
        maximum = self.maximum or (MAX_SECONDS if is_duration else MAX_FACTOR)
        if number > maximum:
            limit = format_duration(maximum) if is_duration else f"{maximum:g}"
            raise self._wrong(f"at most {limit}", value)
        return number

    def _wrong(self, wanted: str, value: object) -> ConfigError:
        # A hostile value may be megabytes long.
        text = repr(value)
        return ConfigError(f"{self.name} must be {wanted}, got {text[:100]}")


SETTINGS = (
    Setting(
        "latency-model",
        "latency_model",
        "formula of the duration of a step",
        Kind.WORD,
        choices=tuple(MODELS),
    ),
    Setting("time-scale", "time_scale", "multiplies every step; 0 does not wait", Kind.NUMBER),
    Setting(
        "prefill-tokens-per-second",
        "prefill_tokens_per_second",
        "linear: prefill rate",
        Kind.NUMBER,
        is_open=True,
    ),
    Setting("step-overhead", "step_overhead_seconds", "linear: fixed time of every step"),
    Setting(
        "prefill-context-time",
        "prefill_context_seconds",
        "linear: per pair of a prompt token and a token of its context",
    ),
    Setting("decode-base", "decode_base_seconds", "linear: fixed time of a step that decodes"),
    Setting("decode-per-seq", "decode_per_sequence_seconds", "linear: per decoding sequence"),
    Setting("kv-read-time", "kv_read_seconds", "linear: per context token of decoding sequences"),
    Setting(
        "time-to-first-token",
        "time_to_first_token_seconds",
        "constant, llm-d: the same for any prompt",
    ),
    Setting(
        "time-to-first-token-std-dev", "time_to_first_token_std_seconds", "its standard deviation"
    ),
    Setting(
        "inter-token-latency", "inter_token_latency_seconds", "constant, llm-d: time between tokens"
    ),
    Setting(
        "inter-token-latency-std-dev", "inter_token_latency_std_seconds", "its standard deviation"
    ),
    Setting("prefill-overhead", "prefill_overhead_seconds", "llm-d: fixed time of any prompt"),
    Setting("prefill-time-per-token", "prefill_per_token_seconds", "llm-d: per uncached token"),
    Setting("prefill-time-std-dev", "prefill_std_seconds", "standard deviation of a prompt's time"),
    Setting(
        "time-factor-under-load",
        "time_factor_under_load",
        "llm-d: slowdown factor of a full batch",
        Kind.NUMBER,
        minimum=1.0,
    ),
    Setting(
        "speedup-ratio", "speedup_ratio", "dynamo: divides all times", Kind.NUMBER, is_open=True
    ),
    Setting(
        "decode-speedup-ratio",
        "decode_speedup_ratio",
        "dynamo: divides decode times",
        Kind.NUMBER,
        is_open=True,
    ),
    Setting(
        "kv-cache-transfer-latency",
        "kv_transfer_seconds",
        "fixed time to transfer KV from another worker",
    ),
    Setting(
        "kv-cache-transfer-time-per-token",
        "kv_transfer_per_token_seconds",
        "transfer time per token of KV, if the fixed time is 0",
    ),
    Setting(
        "output-length",
        "output_length",
        "distribution of the lengths of answers",
        Kind.WORD,
        choices=OUTPUT_LENGTHS,
    ),
    Setting(
        "mean-output-tokens",
        "mean_output_tokens",
        "average length of answers that max_tokens does not cut; with ignore_eos they all run to"
        " max_tokens",
        Kind.NUMBER,
        is_open=True,
    ),
    Setting(
        "output-tokens-std", "output_tokens_std", "gaussian: its standard deviation", Kind.NUMBER
    ),
)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}

_LLM_D_SETTINGS = (
    *("time-factor-under-load", "inter-token-latency", "inter-token-latency-std-dev"),
    *("time-to-first-token", "time-to-first-token-std-dev"),
    *("prefill-overhead", "prefill-time-per-token", "prefill-time-std-dev"),
)
_LLM_D: dict[str, tuple[object, ...]] = {
    "8b-h100-balanced": (2.0, "12ms", "2ms", "100ms", "20ms", "30ms", "250us", "5ms"),
    "70b-h100-tp8-throughput": (3.0, "25ms", "4ms", "200ms", "40ms", "80ms", "500us", "15ms"),
    "small-l40s-edge": (1.5, "15ms", "2ms", "110ms", "15ms", "20ms", "350us", "3ms"),
}


def _presets() -> dict[str, dict[str, object]]:
    """Make two presets of each profile: with a fixed time to first token ("constant"), and with one
    that depends on the prompt's tokens ("per-token").
    """
    presets: dict[str, dict[str, object]] = {"dynamo": {"latency-model": "dynamo"}}
    for name, values in _LLM_D.items():
        pairs = tuple(zip(_LLM_D_SETTINGS, values, strict=True))
        base = {"latency-model": "llm-d", **dict(pairs[:3])}
        presets[f"{name}-constant"] = base | dict(pairs[3:5])
        presets[f"{name}-per-token"] = base | dict(pairs[5:])
    return presets


# The published profiles of the llm-d inference simulator and the default of Dynamo's mocker.
PRESETS: Mapping[str, Mapping[str, object]] = _presets()


def apply(config: SimConfig, given: Mapping[str, object]) -> SimConfig:
    """Change some settings of a configuration. Raise `ConfigError` that names a setting which is
    unknown, has an invalid value, or does not fit the others.
    """
    fields: dict[str, Any] = {}
    for name, value in given.items():
        setting = BY_NAME.get(name)
        if setting is None:
            raise ConfigError(f"unknown setting {name!r}")
        fields[setting.field] = setting.parse(value)
    changed = dataclasses.replace(config, **fields)
    _check_spread("time-to-first-token", changed)
    _check_spread("inter-token-latency", changed)
    return changed


def _check_spread(name: str, config: SimConfig) -> None:
    mean = getattr(config, BY_NAME[name].field)
    std = getattr(config, BY_NAME[f"{name}-std-dev"].field)
    # The tolerance absorbs rounding of decimal durations.
    if std > MAX_STD_SHARE * mean * (1 + 1e-9):
        raise ConfigError(f"{name}-std-dev may be {MAX_STD_SHARE:.0%} of {name} at most")


def show(config: SimConfig) -> dict[str, object]:
    return {setting.name: setting.show(config) for setting in SETTINGS}


def parse_duration(value: object) -> float | None:
    """Return the seconds of "250ms", "1m30s" or a number of milliseconds; None: none of these."""
    if not isinstance(value, str):
        number = _number(value)
        return None if number is None else number / 1e3
    text = value.strip()
    plain = _number_of(text)
    if plain is not None:
        return plain / 1e3
    parts = _DURATION.findall(text)
    if not parts or "".join(parts) != text:
        return None
    units = [part.lstrip("0123456789.") for part in parts]
    pairs = zip(parts, units, strict=True)
    return sum(float(part[: -len(unit)]) / _UNITS[unit] for part, unit in pairs)


def format_duration(seconds: float) -> str:
    """Format seconds in the largest unit without a leading zero: 0.25 → "250ms"."""
    for unit in ("s", "ms", "us", "ns"):
        number = seconds * _UNITS[unit]
        if number >= 1:
            return f"{number:.12g}{unit}"
    return f"{seconds * 1e9:.12g}ns" if seconds else "0s"


def _number(value: object) -> float | None:
    # bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _number_of(text: str) -> float | None:
    try:
        return _number(float(text))
    except ValueError:
        return None
