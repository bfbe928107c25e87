"""What `config show` prints is a configuration with the same meaning, and says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from picker.config.build import Assembly, BuildOptions, assemble, check_config
from picker.config.catalog import builtin_plugins
from picker.config.findings import InvalidConfigError, Severity
from picker.config.load import LoadedConfig
from picker.config.show import aligned, effective_lines, parameters_in_force

FOLDER = Path(__file__).parents[2] / "golden" / "config"
# What is shown says by name what was there by default, and that needs what was turned off.
WITHOUT_DEFAULTS = ("inject_defaults_off", "pools_of_other_clusters")
GOOD = sorted(
    path.name.removesuffix(".in.yaml")
    for path in FOLDER.glob("*.in.yaml")
    if "errors" not in (path.parent / path.name.replace(".in.", ".out.")).read_text()[:7]
)
OPTIONS = BuildOptions(allow_experimental=True)
SMALL = b"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: prefix-cache-scorer, parameters: {matchLengthWeight: 0.5}}
- type: max-score-picker
  name: two
  parameters: {maxNumOfEndpoints: 2}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache-scorer, weight: 3}]
"""
APPROX = "{type: approx-prefix-cache-producer"


def assembled(content: bytes) -> tuple[LoadedConfig, Assembly]:
    return assemble(content, "c.yaml", builtin_plugins(), OPTIONS)


def essence(assembly: Assembly) -> list[object]:
    """Everything that decides about requests, by name and parameters."""
    parts = [
        (plan.name, [(one.instance.name, one.weight) for one in (*plan.filters, *plan.scorers)])
        for plan in assembly.plans
    ]
    pipeline = assembly.pipeline
    steps = (pipeline.producers, pipeline.hooks, pipeline.admitters, pipeline.screeners)
    return [
        {
            name: (one.type_name, parameters_in_force(one.parameters))
            for name, one in assembly.instances.items()
        },
        [(plan.name, plan.picker.instance.name) for plan in assembly.plans if plan.picker],
        parts,
        [[getattr(one, "name", "") for one in step] for step in steps],
        [type(parser).__name__ for parser in pipeline.parsers.parsers],
        [
            (one.source.name, [x.name for x in one.extractors])
            for one in assembly.data_layer.sources
        ],
        assembly.detector and assembly.detector.name,
        flow_control(assembly),
    ]


def flow_control(assembly: Assembly) -> list[object]:
    """Its settings, with policies by name."""
    settings = assembly.flow_control
    if settings is None:
        return []
    names = {id(one.plugin): one.name for one in assembly.instances.values()}
    bands = {0.5: settings.default_band, -0.5: settings.default_negative_band, **settings.bands}
    return [
        {
            priority: (
                names[id(one.fairness)],
                names[id(one.ordering)],
                one.max_bytes,
                one.max_requests,
                one.request_ttl_seconds,
            )
            for priority, one in bands.items()
        },
        (settings.max_bytes, settings.max_requests, settings.max_memory_bytes),
        settings.no_endpoint_ttl_seconds,
        (names[id(settings.usage_limits)], settings.detector_name),
        [names[id(one)] for one in settings.eviction or ()],
    ]


@pytest.mark.parametrize("case", [case for case in GOOD if case not in WITHOUT_DEFAULTS])
def test_what_is_shown_means_the_same(case: str) -> None:
    loaded, before = assembled((FOLDER / f"{case}.in.yaml").read_bytes())
    text = aligned(effective_lines(loaded, before), with_origin=True)
    _, after = assembled(text.encode())
    assert essence(after) == essence(before)


def test_every_value_says_where_it_is_from() -> None:
    """A line of the file, a default, or a plugin that another one needs."""
    loaded, assembly = assembled(SMALL)
    lines = {line.text.strip(" -"): line.origin for line in effective_lines(loaded, assembly)}
    assert lines["matchLengthWeight: 0.5"] == "c.yaml:4"
    assert lines["matchLengthScaleTokens: 8192"] == "default"
    assert lines["name: two"] == "c.yaml:6"
    assert lines["pluginRef: two"] == "default"
    assert lines["weight: 3.0"] == "c.yaml:10"
    assert lines["type: token-producer"] == "auto-created"
    assert lines["type: single-profile-handler"] == "default"
    assert lines["plugins:"] is None


@pytest.mark.parametrize(
    ("plugin", "shown"),
    [
        (f"{APPROX}}}", "blockSizeTokens: 64"),
        (f"{APPROX}, parameters: {{blockSizeTokens: 16}}}}", "blockSizeTokens: 64"),
        (f"{APPROX}, parameters: {{blockSizeTokens: 128}}}}", "blockSizeTokens: 128"),
        (
            "{type: precise-prefix-cache-producer, "
            "parameters: {tokenProcessorConfig: {blockSize: 64}}}",
            "blockSizeTokens: 64",
        ),
        ("{type: max-score-picker, parameters: {maxNumOfEndpoints: 0}}", "maxNumOfEndpoints: 1"),
        ("{type: load-aware-scorer, parameters: {threshold: -1}}", "threshold: 128"),
    ],
)
def test_what_is_shown_is_in_force(plugin: str, shown: str) -> None:
    """Not what is written and replaced; what is shown draws no warning of its own."""
    head = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: "
    loaded, assembly = assembled(f"{head}[{plugin}{_reader_of(plugin)}]".encode())
    lines = effective_lines(loaded, assembly)
    assert shown in [line.text.strip(" -") for line in lines]
    _, again = assembled(aligned(lines, with_origin=False).encode())
    assert again.warnings == ()


def _reader_of(plugin: str) -> str:
    """A scorer that reads what a producer finds; nothing for other plugins."""
    name = plugin.strip("{").partition(",")[0].partition("}")[0].removeprefix("type: ")
    if not name.endswith("-cache-producer"):
        return ""
    reads = f"prefixMatchInfoProducerName: {name}"
    return f", {{type: prefix-cache-scorer, parameters: {{{reads}}}}}"


def test_checking_says_everything_at_once() -> None:
    """Errors and warnings, in the order of the file."""
    content = (FOLDER / "bad_many_things.in.yaml").read_bytes()
    findings = check_config(content, "c.yaml", builtin_plugins(), OPTIONS)
    positions = [(one.line, one.column) for one in findings]
    assert len(findings) >= 15
    assert positions == sorted(positions)
    misspelt = next(one for one in findings if one.key == "plugins[2].type")
    assert misspelt.nearest == "kv-cache-utilization-scorer"
    assert "queue-scorer" in misspelt.allowed
    assert misspelt.severity is Severity.ERROR


def test_checking_what_is_no_yaml_is_one_finding() -> None:
    (finding,) = check_config(b"a: [", "c.yaml", builtin_plugins(), OPTIONS)
    assert finding.where.startswith("c.yaml:")
    with pytest.raises(InvalidConfigError):
        assembled(b"a: [")


def test_a_scorer_that_counts_twice_is_shown_twice() -> None:
    """Both weights are added."""
    ref = b"{pluginRef: prefix-cache-scorer, weight: 3}"
    loaded, before = assembled(SMALL.replace(ref, ref + b", " + ref.replace(b"3", b"4")))
    text = aligned(effective_lines(loaded, before), with_origin=False)
    _, after = assembled(text.encode())
    assert [one.weight for one in after.profiles["default"].scorers] == [3.0, 4.0]
    assert essence(after) == essence(before)


def test_what_is_shown_otherwise_than_written_is_not_from_the_file() -> None:
    """A gate is; that nothing is injected beyond what is shown is not."""
    more = b"featureGates: [flowControl=false]\ndataLayer: {injectDefaults: true}\n"
    loaded, assembly = assembled(SMALL + more)
    lines = {line.text.strip(" -"): line.origin for line in effective_lines(loaded, assembly)}
    assert lines["flowControl=false"] == "c.yaml:11"
    assert lines["haPopulateNonLeaderDatastore=true"] == "default"
    assert lines["injectDefaults: false"] == "default"
    loaded, assembly = assembled(SMALL + more.replace(b"true", b"false"))
    lines = {line.text.strip(" -"): line.origin for line in effective_lines(loaded, assembly)}
    assert lines["injectDefaults: false"] == "c.yaml:12"
