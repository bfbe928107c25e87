"""Picker configurations by name: ours, and the policies of other routers."""

from collections.abc import Mapping
from pathlib import Path

from base.flags import near
from fleet.errors import UsageError
from picker.config.build import DEFAULT_CONFIG
from picker.config.watch import read_config_file
from picker.errors import PickerError

_HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
_LOAD = "- {type: metrics-data-source}\n- {type: core-metrics-extractor}\n"
_PRECISE = """\
- {type: token-producer}
- type: precise-prefix-cache-producer
  parameters: {speculativeIndexing: true, tokenProcessorConfig: {blockSizeTokens: 16}}
"""
_PRODUCER = "prefixMatchInfoProducerName: precise-prefix-cache-producer"
_COSTS = "- {type: expected-cost-scorer"
_INFLIGHT = f"- {{type: inflight-load-producer, parameters: {{{_PRODUCER}}}}}\n"
_TIERS, _COST = "slo-headroom-tier-filter", "latency-cost-scorer"
_QUEUE, _USAGE, _PREFIX = "queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer"
_ACTIVE = "active-request-scorer"
_BLEND = {_PREFIX: 3.0, _QUEUE: 2.0, _USAGE: 2.0}


def _config(plugins: Mapping[str, float | None], before: str = "", of: str = "") -> str:
    """Build one profile of these plugins with their weights. `of` are the parameters of the first,
    as YAML; `before` are plugins outside any profile.
    """
    first = next(iter(plugins))
    listed = "".join(f"- {{type: {name}{of if name == first else ''}}}\n" for name in plugins)
    profile = ", ".join(
        f"{{pluginRef: {name}}}" if weight is None else f"{{pluginRef: {name}, weight: {weight}}}"
        for name, weight in plugins.items()
    )
    profiles = f"schedulingProfiles: [{{name: default, plugins: [{profile}]}}]\n"
    return f"{_HEAD}{_LOAD}{before}{listed}{profiles}"


# None is the picker's built-in configuration.
POLICIES: Mapping[str, str | None] = {
    "default": None,
    "precise": DEFAULT_CONFIG.decode().replace(
        f"{_COSTS}}}\n", f"{_PRECISE}{_INFLIGHT}{_COSTS}, parameters: {{{_PRODUCER}}}}}\n"
    ),
    "random": _config({"random-picker": None}),
    "round-robin": _config({"round-robin-picker": None}),
    "power-of-two": _config({"power-of-two-picker": None}),
    "consistent-hashing": _config({"consistent-hashing-scorer": None}),
    "cache_aware": _config({"cache-aware-scorer": None}),
    "dynamo": _config(
        {"dynamo-cost-scorer": None, "softmax-picker": None},
        _PRECISE + _INFLIGHT,
        f", parameters: {{{_PRODUCER}}}",
    ),
    "load-only": _config({_QUEUE: 1.0, _USAGE: 1.0}),
    "prefix-only": _config({_PREFIX: None}),
    # The built-in configuration of earlier versions.
    "four-scorers": _config({_ACTIVE: 2.0, **_BLEND}, "", ", parameters: {idleThreshold: 8}"),
    # Learned costs; the other scorers decide until they are known, and between equal ones.
    "predicted": _config(
        {_ACTIVE: 2.0, **_BLEND, _TIERS: None, _COST: 100.0}, "", ", parameters: {idleThreshold: 8}"
    ),
    # llm-d's blends of queue, KV use and prefix, by their weights.
    "llm-d-111": _config({_QUEUE: 1.0, _USAGE: 1.0, _PREFIX: 1.0}),
    "llm-d-322": _config(_BLEND),
}


def policy(name: str, flag: str = "--policies") -> tuple[str, str | None]:
    """Return the name and configuration of a policy or file. Raises `UsageError` with `flag`."""
    if name in POLICIES:
        return name, POLICIES[name]
    path = Path(name)
    if not path.is_file():
        hint = near(name, POLICIES) or f" ({', '.join(POLICIES)})"
        raise UsageError(f"{flag}: {name} is neither a file nor the name of a policy{hint}")
    try:
        return path.name, read_config_file(path, flag).decode(errors="replace")
    except PickerError as error:
        raise UsageError(str(error).partition("\n")[0]) from error
