"""Specs of Kubernetes objects that hypothesis draws, most with a few invalid values."""

import copy
from typing import Any

from hypothesis import strategies as st

from tests.support.kube.kubernetes_objects import LEFT_OUT

ODD = st.sampled_from([LEFT_OUT, None, True, 1.0, 1.5, 7, 2**70, "", "x", "x\n", [], {}, [{}]])
NAMES = st.sampled_from(["a", "A.b", "-a", "a-", "é", "x" * 63, "x" * 64, "x" * 254, "9x", "a..b"])
NUMBERS = st.sampled_from([-1, 0, 1, 65535, 65536, 1_000_000, 1_000_001, -(2**31), 2**31])
WORDS = st.sampled_from(["Service", "Deployment", "FailOpen", "http", "h2", "Exact", "Prefix"])


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value)
    found = [at] if at else []
    if isinstance(value, dict | list):
        for key, one in below:
            is_inner = isinstance(one, dict | list)
            found += places(one, (*at, key)) if is_inner else [(*at, key)]
    return found


@st.composite
def nearly(draw: st.DrawFn, valid: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    value = draw(valid)
    for _ in range(draw(st.integers(0, 2))):
        around: Any = value
        if not (found := places(value)):
            break
        *path, last = draw(st.sampled_from(found))
        for step in path:
            around = around[step]
        around[last] = draw(_instead_of(around[last]))
        if around[last] is LEFT_OUT:
            del around[last]
    return value


def _instead_of(value: Any) -> st.SearchStrategy[Any]:
    alike: st.SearchStrategy[Any] = st.just(LEFT_OUT)
    if isinstance(value, int):
        alike = NUMBERS | st.just(float(value))
    elif isinstance(value, str):
        alike = NAMES | WORDS | st.just(f"{value}\n")
    elif isinstance(value, list) and value:
        alike = st.sampled_from([[*value, value[0]], value * 9])
    return alike | st.just(LEFT_OUT) | ODD.map(copy.deepcopy)


def maybe(**kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=kinds)


def both(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda all_of: {k: v for one in all_of for k, v in one.items()})


def having(**kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(kinds)


LABEL_KEYS = st.sampled_from(["app", "example.com/role", "A_b", "k" * 63])
LABELS = st.dictionaries(LABEL_KEYS, st.sampled_from(["", "v", "x" * 63]), min_size=1)
NUMBER = st.integers(1, 65535)
GROUP = st.sampled_from(["", "a.b", "inference.networking.k8s.io"])
KIND = st.sampled_from(["Service", "Deployment"])
NAME = st.sampled_from(["a", "b.c", "x" * 253])
FAILURE_MODE = st.sampled_from(["FailOpen", "FailClose"])
REFERENCE = both(
    having(name=NAME, port=having(number=NUMBER)),
    maybe(group=GROUP, kind=KIND, failureMode=FAILURE_MODE),
)
POOLS = both(
    having(
        selector=having(matchLabels=LABELS),
        targetPorts=st.lists(NUMBER, min_size=1, max_size=8, unique=True).map(
            lambda numbers: [{"number": number} for number in numbers]
        ),
    ),
    maybe(appProtocol=st.sampled_from(["http", "kubernetes.io/h2c"]), endpointPickerRef=REFERENCE),
)
POOL_REFERENCE = both(having(name=NAME), maybe(group=GROUP, kind=KIND))
OBJECTIVES = both(having(poolRef=POOL_REFERENCE), maybe(priority=st.integers(-(2**31), 2**31 - 1)))
MODEL = both(having(value=NAME), maybe(type=st.just("Exact")))
TARGET = both(having(modelRewrite=NAME), maybe(weight=st.integers(1, 1_000_000)))
RULE = maybe(
    matches=st.lists(having(model=MODEL), max_size=2),
    targets=st.lists(TARGET, min_size=1, max_size=2),
)
REWRITES = having(poolRef=POOL_REFERENCE, rules=st.lists(RULE, max_size=2))
