"""Label selectors: Kubernetes' operators, its text form, and its syntax."""

from typing import Any

import msgspec
import pytest

from picker.framework.label_selector import LabelSelector, LabelSelectorParameters

LABELS = {"app": "llm", "tier": "gold", "example.com/zone": "a", "empty": "", "gpus": "8"}


def selector(**parameters: Any) -> LabelSelector:
    return LabelSelector(msgspec.convert(parameters, LabelSelectorParameters))


def expressions(*rows: tuple[str, ...]) -> dict[str, Any]:
    entries = [{"key": key, "operator": word, "values": values} for key, word, *values in rows]
    return {"matchExpressions": entries}


def expression(key: str, operator: str, *values: str) -> LabelSelector:
    return selector(**expressions((key, operator, *values)))


@pytest.mark.parametrize(
    ("key", "operator", "values", "expected"),
    [
        ("app", "In", ("llm", "x"), True),
        ("app", "In", ("x",), False),
        ("gone", "In", ("llm",), False),
        ("empty", "In", ("",), True),
        ("gone", "In", ("",), False),
        ("app", "NotIn", ("x",), True),
        ("app", "NotIn", ("llm", "x"), False),
        ("gone", "NotIn", ("llm",), True),
        ("app", "Exists", (), True),
        ("empty", "Exists", (), True),
        ("gone", "Exists", (), False),
        ("app", "DoesNotExist", (), False),
        ("gone", "DoesNotExist", (), True),
        ("example.com/zone", "In", ("a",), True),
    ],
)
def test_each_operator_means_what_it_means_in_kubernetes(
    key: str, operator: str, values: tuple[str, ...], expected: bool
) -> None:
    assert expression(key, operator, *values).matches(LABELS) is expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, True),
        ({"matchLabels": {"app": "llm", "tier": "gold"}}, True),
        ({"matchLabels": {"app": "llm", "tier": "iron"}}, False),
        ({"matchLabels": {"gone": ""}}, False),
        ({"matchLabels": {"app": "llm"}, **expressions(("tier", "NotIn", "gold"))}, False),
    ],
)
def test_everything_has_to_hold_and_nothing_selects_all(
    parameters: dict[str, Any], expected: bool
) -> None:
    assert selector(**parameters).matches(LABELS) is expected


def test_an_empty_selector_selects_what_has_no_labels() -> None:
    assert selector().matches({})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"matchLabels": {"": "x"}}, "matchLabels"),
        ({"matchLabels": {"-app": "x"}}, "matchLabels"),
        ({"matchLabels": {"a/b/c": "x"}}, "matchLabels"),
        ({"matchLabels": {"/b": "x"}}, "matchLabels"),
        ({"matchLabels": {"Upper.case/b": "x"}}, "matchLabels"),
        ({"matchLabels": {"a" * 64: "x"}}, "matchLabels"),
        ({"matchLabels": {"a": "x" * 64}}, r"matchLabels\['a'\]"),
        ({"matchLabels": {"a": "no spaces"}}, r"matchLabels\['a'\]"),
        ({"matchExpressions": [{"key": "a", "operator": "In"}]}, r"matchExpressions\[0\].values"),
        (expressions(("a", "NotIn")), r"matchExpressions\[0\].values"),
        (expressions(("a", "Exists"), ("a", "Exists", "x")), r"matchExpressions\[1\].values"),
        (expressions(("a", "In", "ä")), r"matchExpressions\[0\].values"),
    ],
)
def test_a_malformed_selector_is_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        selector(**parameters)


@pytest.mark.parametrize("operator", ["in", "Equals", ""])
def test_an_operator_kubernetes_does_not_know_is_refused(operator: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="operator"):
        expression("a", operator, "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("app=llm", True),
        ("app==llm", True),
        (" app = llm , tier in (gold, iron) ", True),
        ("tier notin (gold,iron)", False),
        ("tier!=gold", False),
        ("gone!=gold", True),
        ("app", True),
        ("gone", False),
        ("!gone,app", True),
        ("!app", False),
        ("empty=", True),
        ("example.com/zone in (a),app=llm", True),
        ("! gone", True),
        ("empty in (x,)", True),
        ("gpus>4", True),
        ("gpus<4", False),
        ("app<4", False),
        ("gone<4", False),
    ],
)
def test_the_text_form_says_the_same(text: str, expected: bool) -> None:
    assert LabelSelector.parse(text).matches(LABELS) is expected


@pytest.mark.parametrize(
    "text",
    (
        "a=b=c|a in|a in b|a in (b|=x|a,,b|a b|!|,|app=vllm,|app=v v|app)|in (a)|-x=1|a=-1|!a=b|"
        f"a={'x' * 64}|app in ((a))|a=b(c)"
    ).split("|"),
)
def test_text_that_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write requirements like a=b"):
        LabelSelector.parse(text)


def test_only_whole_numbers_are_ordered() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        LabelSelector.parse("a>b")
