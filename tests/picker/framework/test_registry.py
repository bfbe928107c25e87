"""The registry knows every plugin file and helps with misspelt names."""

import msgspec
import pytest

from picker.config.catalog import builtin_plugins
from picker.errors import ConfigError
from picker.framework.registry import PluginType, Registry


def row(name: str, **fields: tuple[str, ...]) -> PluginType:
    return PluginType(name, object, **fields)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    registry = Registry([row("queue-scorer"), row("random-picker")])
    with pytest.raises(ConfigError, match="'queue-score'; did you mean 'queue-scorer'"):
        registry.get("queue-score")
    with pytest.raises(ConfigError, match="known: queue-scorer, random-picker"):
        registry.get("zzz")


def test_aliases_and_defaults_lead_to_the_row() -> None:
    producer = row("new", default_for=("Thing",), deprecated_aliases=("old",))
    registry = Registry([producer])
    assert registry.get("old") is producer
    assert list(registry) == [producer]
    assert registry.default_producer("Thing") is producer
    assert registry.default_producer("Other") is None


def test_two_types_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two plugins"):
        Registry([row("a"), row("b", deprecated_aliases=("a",))])


def test_a_producer_that_is_named_by_nothing_is_the_default_one() -> None:
    """Templates of configurations leave empty strings where nothing was chosen."""
    checked = 0
    for kind in builtin_plugins():
        fields = msgspec.structs.fields(kind.parameters)
        required = {one.name: None for one in fields if one.required}
        for one in fields:
            if one.name.endswith("producer_name"):
                parameters = kind.parameters(**{**required, one.name: ""})
                assert getattr(parameters, one.name) == one.default, (kind.name, one.name)
                checked += one.default != ""
    assert checked > 10
