"""A configuration is replaced as a whole; unchanged plugins retain their state."""

import pytest

from picker.app.in_use import ConfigInUse
from picker.config.build import Assembly, BuildOptions
from picker.config.catalog import builtin_plugins
from picker.config.load import LoadedConfig, load_config
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics

DISAGGREGATED = """
- {type: disagg-profile-handler, parameters: {deciders: {prefill: worth-it}}}
- {type: prefix-based-pd-decider, name: worth-it, parameters: {nonCachedTokens: %d}}
- {type: decode-filter}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""


def config(plugins: str = "- {type: prefix-cache-scorer}\n", more: str = "") -> LoadedConfig:
    head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
    return load_config((head + plugins.lstrip("\n") + more).encode(), "c.yaml")


def in_use(loaded: LoadedConfig, metrics: PickerMetrics | None = None) -> ConfigInUse:
    return ConfigInUse(loaded, builtin_plugins(), metrics or PickerMetrics(), BuildOptions())


def plugin(used: ConfigInUse, name: str) -> object:
    return used.assembly.instances[name].plugin


def test_plugins_with_unchanged_entries_are_reused() -> None:
    used = in_use(config("- {type: prefix-cache-scorer}\n- {type: max-score-picker}\n"))
    index, picker = plugin(used, "approx-prefix-cache-producer"), plugin(used, "max-score-picker")
    parsers = used.assembly.pipeline.parsers.parsers
    other = "- {type: max-score-picker, parameters: {maxNumOfEndpoints: 2}}\n"
    used.apply(config("- {type: queue-scorer}\n- {type: prefix-cache-scorer}\n" + other))
    assert plugin(used, "approx-prefix-cache-producer") is index
    assert used.assembly.pipeline.parsers.parsers == parsers
    assert plugin(used, "max-score-picker") is not picker
    used.apply(config("- {type: approx-prefix-cache-producer, parameters: {autoTune: false}}\n"))
    assert plugin(used, "approx-prefix-cache-producer") is not index


def test_a_plugin_that_names_a_changed_one_is_created_anew() -> None:
    used = in_use(config(DISAGGREGATED % 1))
    decider, handler = plugin(used, "worth-it"), plugin(used, "disagg-profile-handler")
    used.apply(config(DISAGGREGATED % 1, "# same\n"))
    assert plugin(used, "worth-it") is decider
    assert plugin(used, "disagg-profile-handler") is handler
    used.apply(config(DISAGGREGATED % 2))
    assert plugin(used, "worth-it") is not decider
    assert plugin(used, "disagg-profile-handler") is not handler


def test_listeners_are_notified_of_each_new_assembly() -> None:
    used = in_use(config())
    notified: list[Assembly] = []
    used.subscribe(notified.append)
    used.apply(config("- {type: queue-scorer}\n"))
    assert notified == [used.assembly]


@pytest.mark.parametrize(
    ("plugins", "more", "reason"),
    [
        ("- {type: queue-scorrer}\n", "", "did you mean 'queue-scorer'"),
        (
            "- {type: metrics-data-source, parameters: {port: 9}}\n",
            "",
            "dataLayer.sources: cannot change while the picker runs",
        ),
        (
            "- {type: file-discovery, parameters: {path: x}}\n",
            "dataLayer: {discovery: {pluginRef: file-discovery}}\n",
            "c.yaml:5:13: dataLayer.discovery: cannot change while the picker runs",
        ),
    ],
)
def test_an_unusable_configuration_changes_nothing(plugins: str, more: str, reason: str) -> None:
    used = in_use(config())
    before = used.assembly
    used.subscribe(lambda _: pytest.fail("a listener was notified"))
    with pytest.raises(ConfigError) as error:
        used.apply(config(plugins, more))
    assert reason in str(error.value)
    assert used.assembly is before


def test_an_explicit_default_data_layer_is_no_change() -> None:
    used = in_use(config())
    used.apply(
        config(
            "- {type: metrics-data-source}\n- {type: core-metrics-extractor}\n",
            "dataLayer: {sources: [{pluginRef: metrics-data-source,"
            " extractors: [{pluginRef: core-metrics-extractor}]}]}\n",
        )
    )


def test_only_the_indexes_in_use_have_a_size() -> None:
    metrics = PickerMetrics()
    used = in_use(config(), metrics)

    def shown() -> set[str]:
        return {labels[0] for labels, _ in metrics.prefix_indexer_size.numbers()}

    assert shown() == {"approx-prefix-cache-producer"}
    used.apply(config("- {type: approx-prefix-cache-producer, name: mine}\n"))
    assert shown() == {"mine"}
