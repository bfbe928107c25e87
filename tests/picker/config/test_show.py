"""`config show` prints a configuration with the same meaning, and the origin of each line."""

from typing import Any

import pytest

from picker.config.build import Assembly, BuildOptions, assemble, check_config
from picker.config.catalog import builtin_plugins
from picker.config.findings import InvalidConfigError, Severity
from picker.config.load import LoadedConfig
from picker.config.show import aligned, effective_lines, parameters_in_force
from tests.support.picker.assembly_meaning import meaning
from tests.support.picker.configured_requests import GOLDEN, golden_output

# The output names default plugins, which need the defaults that these turn off.
WITHOUT_DEFAULTS = ("inject_defaults_off", "pools_of_other_clusters")
GOOD = [case for case in GOLDEN if "errors" not in golden_output(case).read_text()[:7]]
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


def essence(assembly: Assembly) -> dict[str, Any]:
    plugins = {
        name: (one.type_name, parameters_in_force(one.parameters))
        for name, one in assembly.instances.items()
    }
    return {**meaning(assembly), "plugins": plugins, "warnings": None}


@pytest.mark.parametrize("case", [case for case in GOOD if case not in WITHOUT_DEFAULTS])
def test_the_output_has_the_same_meaning(case: str) -> None:
    loaded, before = assembled(GOLDEN[case].read_bytes())
    text = aligned(effective_lines(loaded, before), with_origin=True)
    _, after = assembled(text.encode())
    assert essence(after) == essence(before)


def test_every_value_has_its_origin() -> None:
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
def test_the_effective_value_is_shown(plugin: str, shown: str) -> None:
    head = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: "
    loaded, assembly = assembled(f"{head}[{plugin}{_reader_of(plugin)}]".encode())
    lines = effective_lines(loaded, assembly)
    assert shown in [line.text.strip(" -") for line in lines]
    _, again = assembled(aligned(lines, with_origin=False).encode())
    assert again.warnings == ()


def _reader_of(plugin: str) -> str:
    name = plugin.strip("{").partition(",")[0].partition("}")[0].removeprefix("type: ")
    if not name.endswith("-cache-producer"):
        return ""
    reads = f"prefixMatchInfoProducerName: {name}"
    return f", {{type: prefix-cache-scorer, parameters: {{{reads}}}}}"


def test_a_check_reports_all_findings_in_the_order_of_the_file() -> None:
    content = GOLDEN["bad_many_things"].read_bytes()
    findings = check_config(content, "c.yaml", builtin_plugins(), OPTIONS)
    positions = [(one.line, one.column) for one in findings]
    assert len(findings) >= 15
    assert positions == sorted(positions)
    misspelt = next(one for one in findings if one.key == "plugins[2].type")
    assert misspelt.nearest == "kv-cache-utilization-scorer"
    assert "queue-scorer" in misspelt.allowed
    assert misspelt.severity is Severity.ERROR


def test_a_check_of_invalid_yaml_is_one_finding() -> None:
    (finding,) = check_config(b"a: [", "c.yaml", builtin_plugins(), OPTIONS)
    assert finding.where.startswith("c.yaml:")
    with pytest.raises(InvalidConfigError):
        assembled(b"a: [")


def test_a_scorer_with_two_weights_is_shown_twice() -> None:
    ref = b"{pluginRef: prefix-cache-scorer, weight: 3}"
    loaded, before = assembled(SMALL.replace(ref, ref + b", " + ref.replace(b"3", b"4")))
    text = aligned(effective_lines(loaded, before), with_origin=False)
    _, after = assembled(text.encode())
    assert [one.weight for one in after.profiles["default"].scorers] == [3.0, 4.0]
    assert essence(after) == essence(before)


def test_a_value_that_differs_from_the_file_is_a_default() -> None:
    more = b"featureGates: [flowControl=false]\ndataLayer: {injectDefaults: true}\n"
    loaded, assembly = assembled(SMALL + more)
    lines = {line.text.strip(" -"): line.origin for line in effective_lines(loaded, assembly)}
    assert lines["flowControl=false"] == "c.yaml:11"
    assert lines["haPopulateNonLeaderDatastore=true"] == "default"
    assert lines["injectDefaults: false"] == "default"
    loaded, assembly = assembled(SMALL + more.replace(b"true", b"false"))
    lines = {line.text.strip(" -"): line.origin for line in effective_lines(loaded, assembly)}
    assert lines["injectDefaults: false"] == "c.yaml:12"
