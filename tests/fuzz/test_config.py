"""Any text as a configuration is built or refused with a reason, and in no other way."""

import contextlib
from typing import Any

import yaml
from hypothesis import strategies as st

from picker.config.build import BuildOptions, build, check_config
from picker.config.catalog import builtin_plugins
from picker.config.decode import duration_seconds, quantity_bytes
from picker.config.findings import Severity
from picker.config.load import load_config
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics
from tests.fuzz.conftest import ForSeconds
from tests.support.picker.configured_requests import GOLDEN

GOLDENS = [path.read_text() for path in GOLDEN.values()]
WORDS = sorted({word for text in GOLDENS for word in text.replace(",", " ").split()})
REGISTRY = builtin_plugins()
OPTIONS = BuildOptions(allow_experimental=True)

NOISE = st.sampled_from(
    [
        *("- &a [*a]", "a: &x {b: *x}", "{", "plugins: 5", "? [a]: b", "!!set {a}", "null", "[]"),
        *("<<: *a", "!!python/object:os.system {}", ".nan", "0x7fffffffffffffffffff", "!!bool x"),
        *("!!binary aGk=", "- - - -", "'", "\t", "%YAML 9.9", "---", "...", "&a *a", "\x00"),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(sorted(REGISTRY.names)),
    st.dates(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    lines = draw(st.sampled_from(GOLDENS)).splitlines()
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(lines)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            lines.insert(at, draw(st.one_of(NOISE, st.text(max_size=12))))
        elif kind == 1 and lines:
            del lines[min(at, len(lines) - 1)]
        elif kind == 2 and lines:
            words = lines[min(at, len(lines) - 1)].split(" ")
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(WORDS))
            lines[min(at, len(lines) - 1)] = " ".join(words)
        else:
            other = draw(st.sampled_from(GOLDENS)).splitlines()
            lines.insert(at, draw(st.sampled_from(other or ["-"])))
    return "\n".join(lines).encode(errors="surrogatepass")


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    document = draw(st.sampled_from(GOLDENS).map(_mapping).filter(bool))
    for _ in range(draw(st.integers(1, 4))):
        node = document
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()) or not isinstance(node[key], dict | list):
                node[key] = draw(VALUES)
                break
            node = node[key]
    return yaml.safe_dump(document, allow_unicode=True).encode(errors="surrogatepass")


def _mapping(text: str) -> dict[Any, Any]:
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def build_or_refuse(content: bytes) -> None:
    said = ""
    try:
        loaded = load_config(content, "f")
        build(loaded, REGISTRY, PickerMetrics(), lambda: 0.0, OPTIONS)
    except ConfigError as error:
        said = str(error)
    assert not said or all(line.startswith("f") for line in said.splitlines() if line)
    findings = check_config(content, "f", REGISTRY, OPTIONS)
    assert any(one.severity is Severity.ERROR for one in findings) == bool(said)


def test_mangled_text_is_built_or_refused(for_seconds: ForSeconds) -> None:
    for_seconds(mangled(), build_or_refuse)


def test_other_values_are_built_or_refused(for_seconds: ForSeconds) -> None:
    for_seconds(altered(), build_or_refuse)


def test_bytes_are_built_or_refused(for_seconds: ForSeconds) -> None:
    for_seconds(st.binary(max_size=64), build_or_refuse)


def test_quantities_and_durations_are_read_or_refused(for_seconds: ForSeconds) -> None:
    def read(text: str) -> None:
        for parse in (duration_seconds, quantity_bytes):
            with contextlib.suppress(ConfigError):
                assert parse(text) >= 0

    for_seconds(st.from_regex(r"[0-9.]{0,6}[a-zA-Z\u00b5\u0664 -]{0,4}[0-9]{0,3}[a-z]{0,2}"), read)
