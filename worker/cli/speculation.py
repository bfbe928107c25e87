"""`--speculative-config`: vLLM's JSON, strictly decoded, with its defaults and constraints."""

import argparse
import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from worker.cli.objects import Kind, checked, decoded, integer, word
from worker.config import (
    DRAFT_SAMPLE_METHODS,
    MAX_SPECULATIVE_TOKENS,
    MODEL_METHODS,
    REJECTION_SAMPLE_METHODS,
    SPECULATIVE_METHODS,
    SpeculativeConfig,
)
from worker.errors import ConfigError

FLAG = "--speculative-config"
SHORT_FLAG = "-sc"
# A worker's default, and so that of fleets and manifests: it suits any model, and switches itself
# off where it does not pay.
LOOKUP = (
    '{"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_min": 1,'
    ' "prompt_lookup_max": 16}'
)
# The usual number of drafts of a draft model or head.
DEFAULT_MODEL_DRAFTS = 5
DEFAULT_LOOKUP_TOKENS = 5
SIM_METHODS = ("ngram", "suffix")
_MAX = 1 << 20  # of fields without a bound of their own

_USE_EAGLE = "use eagle, with a head that `pointsman train-draft` makes"
_USE_LOOKUP = "use ngram or suffix"
_GET_MODEL: Mapping[str, str] = {
    "draft_model": "download it and give its path",
    "eagle": "give the path of a head that `pointsman train-draft` made, or leave model out",
    "eagle3": "download it and give its path",
}
# Methods of vLLM that are missing here: the reason, or the method to use instead.
_OTHER_METHODS: Mapping[str, str] = {
    "ngram_gpu": "use ngram, which costs a GPU nothing",
    "mtp": f"it needs a model with such layers; {_USE_EAGLE}",
    "medusa": _USE_EAGLE,
    "mlp_speculator": _USE_EAGLE,
    "dflash": _USE_EAGLE,
    "dspark": f"{_USE_EAGLE}; its adaptive length is on for every method",
    "extract_hidden_states": "it drafts nothing",
    "custom_class": "there are no drafters from outside",
}
# Fields of vLLM that are missing here, with the reason. Null and, for a switch, false are accepted:
# they ask for what happens anyway.
_OTHER_FIELDS: Mapping[str, str] = {
    "synthetic_acceptance_rates": "only tokens that the model would draw are accepted",
    "synthetic_acceptance_length": "only tokens that the model would draw are accepted",
    "use_heterogeneous_vocab": "a draft model must have the vocabulary of its target",
    "parallel_drafting": "drafts are made one after the other",
    "disable_padded_drafter_batch": "drafters run no padding",
    "disable_eagle_block_drop": "no cached block is dropped for a head",
    "disable_by_batch_size": "use num_speculative_tokens_per_batch_size",
    "quantization": "a draft model runs as its file says",
    "revision": "models are files",
    "code_revision": "models are files",
    "max_model_len": "a draft model follows its target to the end",
}


def speculative_config(options: argparse.Namespace) -> SpeculativeConfig | None:
    """Decode `--speculative-config`, whose model must exist; without one it is `LOOKUP`, and null
    for the simulator. Raises `ConfigError` with the fix.
    """
    text: str | None = options.speculative_config
    if text is None and options.engine == "torch":
        text = LOOKUP
    if text is None or text.strip() == "null":
        return None
    given = decoded(FLAG, text)
    config = parse(given)
    if options.engine == "sim" and config.method not in SIM_METHODS:
        raise ConfigError(
            f"{FLAG}: --engine sim has no model for method {config.method!r}; {_USE_LOOKUP}"
        )
    if config.model is not None and not os.path.exists(config.model):
        raise ConfigError(
            f"{FLAG}: model {given['model']!r} is not a file or directory here;"
            f" {_GET_MODEL[config.method]}"
        )
    return config


def parse(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Parse a JSON object; null means not given. Raises `ConfigError`."""
    fields = {name: value for name, value in given.items() if value is not None}
    method = _method(fields)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in _FIELDS:
            _refuse(name, value)
        else:
            if isinstance(value, str) and value in _OTHER_VALUES:
                raise ConfigError(f"{FLAG}: {name} {value!r} is {_OTHER_VALUES[value]}")
            values[name] = checked(FLAG, name, value, _FIELDS[name])
    for name in values:
        _check_method(name, values[name], method)
    values["method"] = method
    values.pop("draft_tensor_parallel_size", None)
    if method == "ngram":
        values |= _lookup_lengths(values)
    if method in MODEL_METHODS:
        values["model"] = _model(values, method)
    values.setdefault("num_speculative_tokens", _default_length(method, values))
    config = SpeculativeConfig(**values)
    _check_table(config)
    _check_rejection(config)
    return config


# ---- the method ---------------------------------------------------------------------------------


def _method(fields: dict[str, Any]) -> str:
    """Find or derive the method; remove a `model` that names a method (`"model": "ngram"`)."""
    method, model = fields.get("method"), fields.get("model")
    for named in SIM_METHODS:  # as vLLM has spelled it, and still takes it
        if model in (named, f"[{named}]") and method in (None, named, f"[{named}]"):
            del fields["model"]
            method = named
    if method is None:
        if model is None:
            raise ConfigError(f"{FLAG}: method is missing; {_known_methods()}")
        method = "draft_model"
    if method in SPECULATIVE_METHODS:
        return str(method)
    name = str(method).strip("[]")
    reason = _OTHER_METHODS.get("mtp" if name.endswith("_mtp") else name)
    if reason is None:
        raise ConfigError(f"{FLAG}: unknown method {method!r}; {_known_methods()}")
    raise ConfigError(f"{FLAG}: method {name!r} is not supported: {reason}; {_known_methods()}")


def _known_methods() -> str:
    return f"supported are {', '.join(SPECULATIVE_METHODS)}"


def _check_method(name: str, value: object, method: str) -> None:
    methods = _METHODS_OF.get(name, SPECULATIVE_METHODS)
    if method in methods or value == _defaults().get(name):
        return
    raise ConfigError(
        f"{FLAG}: {name} is of method {' and '.join(methods)}, not of {method}; leave it out"
    )


def _defaults() -> dict[str, object]:
    return {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}


# ---- the fields ---------------------------------------------------------------------------------


def _refuse(name: str, value: object) -> None:
    reason = _OTHER_FIELDS.get(name)
    if reason is None:
        near = difflib.get_close_matches(name, _FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_FIELDS)}"
        raise ConfigError(f"{FLAG}: unknown field {name!r}; {hint}")
    if value is not False:
        raise ConfigError(f"{FLAG}: {name} is not supported: {reason}; leave it out")


# Values that vLLM accepts and this worker does not, with the reason.
_OTHER_VALUES: Mapping[str, str] = {
    "synthetic": "not supported: it would accept drafts that the model rejects, and answers here"
    f" are always the model's own; supported are {', '.join(REJECTION_SAMPLE_METHODS)}"
}
_FIELDS: Mapping[str, Kind] = {
    "method": (Any, ""),  # checked before the others
    "num_speculative_tokens": integer(1, MAX_SPECULATIVE_TOKENS),
    "model": (Annotated[str, Meta(min_length=1)], "the path of a model"),
    "prompt_lookup_min": integer(1, _MAX),
    "prompt_lookup_max": integer(1, _MAX),
    "suffix_decoding_max_tree_depth": integer(1, 4096),
    "suffix_decoding_max_cached_requests": integer(0, _MAX),
    "suffix_decoding_max_spec_factor": (Annotated[float, Meta(ge=0)], "a number of 0 or more"),
    "suffix_decoding_min_token_prob": (Annotated[float, Meta(ge=0, le=1)], "a number in [0, 1]"),
    "draft_sample_method": word(DRAFT_SAMPLE_METHODS),
    "rejection_sample_method": word(REJECTION_SAMPLE_METHODS),
    "draft_tensor_parallel_size": (Literal[1], "1, as every rank drafts by itself"),
    "num_speculative_tokens_per_batch_size": (
        tuple[tuple[int, int, int], ...],
        "a list of [first batch size, last batch size, number of drafts]",
    ),
    "enable_adaptive_verification": (bool, "true or false"),
}
_METHODS_OF: Mapping[str, tuple[str, ...]] = {
    "model": MODEL_METHODS,
    "draft_sample_method": MODEL_METHODS,
    "rejection_sample_method": MODEL_METHODS,
    **dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), ("ngram",)),
    **{name: ("suffix",) for name in _FIELDS if name.startswith("suffix_decoding_")},
}


# ---- constraints between fields -------------------------------------------------------------


def _lookup_lengths(values: Mapping[str, Any]) -> dict[str, int]:
    """Fill in a missing length from the other one, or both from the default."""
    least, most = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    first = least or most or DEFAULT_LOOKUP_TOKENS
    last = most or first
    if first > last:
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min {first} is more than prompt_lookup_max {last}"
        )
    return {"prompt_lookup_min": first, "prompt_lookup_max": last}


def _model(values: Mapping[str, Any], method: str) -> str | None:
    """Return the absolute path, for the engine process; None: the head that fits the target."""
    model: str | None = values.get("model")
    if model is not None:
        return os.path.abspath(os.path.expanduser(model))
    if method == "draft_model":
        raise ConfigError(f"{FLAG}: method draft_model needs model, the path of a small model")
    if method == "eagle3":
        raise ConfigError(f"{FLAG}: method eagle3 needs model, the directory of a published head")
    return None


def _default_length(method: str, values: Mapping[str, Any]) -> int:
    if "num_speculative_tokens" in values:
        return int(values["num_speculative_tokens"])
    if method in MODEL_METHODS:
        return DEFAULT_MODEL_DRAFTS
    if method == "suffix":
        default = SpeculativeConfig.__dataclass_fields__["suffix_decoding_max_tree_depth"].default
        depth = int(values.get("suffix_decoding_max_tree_depth", default))
        return min(depth, MAX_SPECULATIVE_TOKENS)
    raise ConfigError(
        f"{FLAG}: num_speculative_tokens is missing: the most tokens to draft at once,"
        f" in [1, {MAX_SPECULATIVE_TOKENS}]"
    )


def _check_rejection(config: SpeculativeConfig) -> None:
    default = SpeculativeConfig.__dataclass_fields__["rejection_sample_method"].default
    chosen = config.rejection_sample_method
    if chosen != default and config.draft_sample_method != "probabilistic":
        raise ConfigError(
            f"{FLAG}: rejection_sample_method {chosen!r} is of draft_sample_method"
            f" 'probabilistic', not of {config.draft_sample_method!r}, whose drafts are not"
            " rejected by chance; leave it out"
        )


def _check_table(config: SpeculativeConfig) -> None:
    name, most = "num_speculative_tokens_per_batch_size", config.num_speculative_tokens
    last = 0
    for row, (start, end, drafts) in enumerate(config.num_speculative_tokens_per_batch_size):
        if row == 0 and start != 1:
            raise ConfigError(f"{FLAG}: {name} must begin with batch size 1, not {start}")
        if not last < start <= end:
            raise ConfigError(
                f"{FLAG}: {name} must be in order of batch size, without overlaps;"
                f" [{start}, {end}, {drafts}] is not, after batch size {last}"
            )
        if not 0 <= drafts <= most:
            raise ConfigError(
                f"{FLAG}: {name} may ask for 0 to num_speculative_tokens ({most}) drafts,"
                f" not {drafts}"
            )
        last = end
