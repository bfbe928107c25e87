"""Loading fails only with a reason; the golden cases have the reasons."""

import msgspec
import pytest

from picker.config.build import DEFAULT_CONFIG, Assembly, BuildOptions, assemble
from picker.config.catalog import builtin_plugins
from picker.config.findings import MAX_FINDINGS, InvalidConfigError, Severity
from picker.config.load import MAX_CONFIG_BYTES, load_config
from picker.errors import ConfigError


@pytest.mark.parametrize("content", [b"\xff\xff", b"a: \x00", b"x" * (MAX_CONFIG_BYTES + 1)])
def test_bytes_that_are_not_text_are_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="f: "):
        load_config(content, "f")


def test_the_built_in_configuration_scores_by_expected_cost() -> None:
    _, assembly = assemble(DEFAULT_CONFIG, "f", builtin_plugins(), BuildOptions())
    scorers = assembly.profiles["default"].scorers
    assert [(one.name, one.weight) for one in scorers] == [("expected-cost-scorer", 1.0)]
    assert assembly.warnings == ()


HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
PROFILE = """
plugins: [{{type: queue-scorer}}]
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: queue-scorer, weight: {}}}]}}
"""


def built(text: str, **options: bool) -> Assembly:
    content = (HEAD + text).encode()
    return assemble(content, "f", builtin_plugins(), BuildOptions(**options))[1]


def weight_of(text: str) -> float:
    return built(PROFILE.format(text)).profiles["default"].scorers[0].weight


@pytest.mark.parametrize(
    "value", ["!!timestamp x", "!!bool x", "!!int ''", "!!float x", "!!int " + "9" * 5000]
)
def test_a_value_that_does_not_fit_its_tag_is_refused(value: str) -> None:
    """An unexpected error would end a running picker."""
    with pytest.raises(ConfigError, match=r"f: not valid YAML: .+"):
        built(f"plugins: {value}\n")


@pytest.mark.parametrize("depth", [50, 100, 300, 950])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_refused(depth: int, brackets: str) -> None:
    opening = "[" if brackets == "[]" else "{a: "
    nested = opening * depth + "1" + brackets[1] * depth
    with pytest.raises(ConfigError, match="f:"):
        built(f"plugins: [{{type: queue-scorer, parameters: {{a: {nested}}}}}]\n")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("2", 2), ("0", 0), ("-1", -1), ("1.5", 1.5), ("1e3", 1000), ("1E-1", 0.1), ("1_0", 10)),
        *(("0x10", 16), ("010", 8), ("089", 89), ("+.5", 0.5), ("1.", 1)),
    ],
)
def test_numbers_are_those_of_the_reference(text: str, number: float) -> None:
    assert weight_of(text) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(('"2"', "a string"), ("true", "true or false"), ("1:30", "a string"), ("[1]", "a list")),
        *(("2020-01-01", "a string"), ("two", "a string")),
    ],
)
def test_a_text_that_resembles_a_number_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"weight: expected a number, got {said}"):
        weight_of(text)


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "1e400", "9" * 400])
def test_a_number_that_is_not_finite_is_refused_everywhere(text: str) -> None:
    """The reference reads everything through JSON, which has no such numbers."""
    with pytest.raises(ConfigError, match="weight: must be a finite number"):
        weight_of(text)
    picker = f"plugins: [{{type: session-id-producer, parameters: {{x: [1, {text}]}}}}]\n"
    with pytest.raises(ConfigError, match=r"parameters.x\[1\]: must be a finite number"):
        built(picker)


def test_an_integer_may_have_a_zero_fraction() -> None:
    text = "plugins: [{type: max-score-picker, parameters: {maxNumOfEndpoints: %s}}]\n"
    assert (
        built(text % "2.0").instances["max-score-picker"].parameters
        == built(text % "2").instances["max-score-picker"].parameters
    )
    for wrong in ("1.5", "1" + "0" * 20):
        with pytest.raises(ConfigError, match="maxNumOfEndpoints: expected a whole number"):
            built(text % wrong)


def test_a_label_may_resemble_a_date_and_its_name_a_number() -> None:
    text = "{type: label-selector-filter, parameters: {matchLabels: {5: 2020-01-01, on: x}}}"
    parameters = built(f"plugins: [{text}]\n").instances["label-selector-filter"].parameters
    assert msgspec.to_builtins(parameters)["matchLabels"] == {"5": "2020-01-01", "true": "x"}


def test_a_label_without_a_value_is_refused() -> None:
    """Without the label the filter would admit endpoints that it must remove."""
    text = "plugins: [{type: label-selector-filter, parameters: {matchLabels: {gpu: , a: b}}}]\n"
    with pytest.raises(ConfigError, match="matchLabels"):
        built(text)


def test_an_unknown_key_without_a_value_is_refused() -> None:
    assert built("plugins:\nschedulingProfiles:\n").warnings == ()
    with pytest.raises(ConfigError, match="pluginz: unknown key; did you mean 'plugins'"):
        built("pluginz:\n")


def test_merged_keys_may_be_overridden() -> None:
    text = "plugins:\n- &a {type: queue-scorer, name: q}\n- {<<: *a, name: q2}\n"
    assert {"q", "q2"} <= built(text).instances.keys()
    with pytest.raises(ConfigError, match=r"^f:5:22: plugins\[1\].type: unknown plugin type"):
        built(text.replace("name: q2", "name: q2, type: x"))
    with pytest.raises(ConfigError, match=r"f:5:\d+: name: duplicate key, first in line 5"):
        built(text.replace("name: q2", "name: r, name: s"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plugins:\n\t- {}\n", "f:4:1: not valid YAML: .*a tab"),
        ("---\n{}\n", "f:3:1: not valid YAML: expected a single document .*another document"),
        ("a: &x 1\nb: &x 1\n", "f:4:4: not valid YAML: found duplicate anchor"),
        ("featureGates: [flowControl=]\n", "'' is neither true nor false"),
        ("featureGates: [haPopulateNonLeaderDatastore=]\n", "'' is neither true nor false"),
    ],
)
def test_invalid_yaml_or_an_empty_gate_is_explained(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(text)


def test_findings_beyond_the_limit_are_counted_and_not_listed() -> None:
    """Otherwise an invalid file of a megabyte would block a running picker for minutes."""
    with pytest.raises(InvalidConfigError) as caught:
        built("".join(f"k{index}: 1\n" for index in range(MAX_FINDINGS * 5)))
    findings = caught.value.findings
    assert len(findings) == MAX_FINDINGS + 1
    assert (findings[-1].severity, findings[-1].line) == (Severity.ERROR, None)
    assert "further findings" in str(caught.value)


def models_sources(text: str, lists_models: bool = True) -> list[tuple[str, list[str], str]]:
    plan = built(text, lists_models=lists_models, allow_experimental=True).data_layer
    return [
        (one.source.name, [other.name for other in one.extractors], one.source.parameters.interval)
        for one in plan.sources
        if one.source.type_name == "models-data-source"
    ]


OWN_MODELS = """
plugins:
- {type: models-data-source, name: own, parameters: {interval: 5s}}
- {type: models-data-extractor}
dataLayer:
  sources: [{pluginRef: own, extractors: [{pluginRef: models-data-extractor}]}]
"""


def test_endpoints_are_asked_for_their_models_on_demand() -> None:
    extractor = ["models-data-extractor"]
    assert models_sources("", lists_models=False) == []
    assert models_sources("") == [("models-data-source", extractor, "1s")]
    assert models_sources(OWN_MODELS) == [("own", extractor, "5s")]


def test_allowed_plugins_of_alpha_types_are_listed() -> None:
    plugins = "plugins: [{type: queue-scorer}, {type: topology-affinity-scorer, name: near}]\n"
    assert built(plugins, allow_experimental=True).experimental == ("near",)
