"""Label selectors of the command line, checked against the fake API server's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kube_api.resources import Catalogue
from kube_api.selectors import parse_selector as servers_selector

from picker.errors import ConfigError
from picker.k8s.selectors import parse_selector


@pytest.mark.parametrize(
    ("text", "labels", "is_met"),
    [
        ("app=vllm", {"app": "vllm"}, True),
        ("app==vllm", {"app": "sglang"}, False),
        ("app = vllm , tier!=old", {"app": "vllm"}, True),
        ("tier!=old", {"tier": "old"}, False),
        ("app in (a, b)", {"app": "b"}, True),
        ("app in (a)", {}, False),
        ("app notin (a,b)", {}, True),
        ("app notin (a,b)", {"app": "a"}, False),
        ("app", {"app": ""}, True),
        ("!app", {"app": ""}, False),
        ("! app", {}, True),
        ("llm-d.ai/role in (decode,),x", {"llm-d.ai/role": "decode", "x": "1"}, True),
        ("gpus>4", {"gpus": "8"}, True),
        ("gpus<4", {"gpus": "many"}, False),
        ("gpus<4", {}, False),
        ("app=", {"app": ""}, True),
    ],
)
def test_selectors_select(text: str, labels: dict[str, str], is_met: bool) -> None:
    """Equality, sets, presence and order."""
    assert parse_selector(text).selects(labels) is is_met


@pytest.mark.parametrize(
    "text",
    (
        "|  |,|app=vllm,|a b|app=v v|app in a|app in (a|app)|in (a)|-x=1|a=-1|a>b|!a=b|"
        f"a={'x' * 64}|app in ((a))|a=b,,c=d|a=b(c)"
    ).split("|"),
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    """At start, and not by an API server for ever after."""
    with pytest.raises(ConfigError):
        parse_selector(text)


PODS = Catalogue().named("pods")
KEYS = st.sampled_from(["a", "b", "x.io/c"])
VALUES = st.sampled_from(["", "1", "v", "w"])
REQUIREMENTS = st.one_of(
    st.builds("{}{}{}".format, KEYS, st.sampled_from(["=", "==", "!="]), VALUES),
    st.builds("{} {} ({},{})".format, KEYS, st.sampled_from(["in", "notin"]), VALUES, VALUES),
    st.builds("{}{}".format, st.sampled_from(["", "!"]), KEYS),
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(REQUIREMENTS, min_size=1, max_size=3).map(",".join),
    st.dictionaries(KEYS, VALUES),
)
def test_selectors_mean_what_they_mean_to_the_server(text: str, labels: dict[str, str]) -> None:
    """Of any selector both say the same of any labels."""
    server = servers_selector(PODS, None, text, "")
    assert parse_selector(text).selects(labels) is server({"metadata": {"labels": labels}})
