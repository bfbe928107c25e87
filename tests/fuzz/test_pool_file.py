"""Any text in an endpoints file is read or reported, within bounds."""

from random import Random
from typing import Any

import msgspec
import yaml
from hypothesis import strategies as st

from picker.config.findings import MAX_FINDINGS, Severity
from picker.config.pool_file import PoolFile, read_policies, read_pool_file
from picker.errors import ConfigError
from picker.pool.policies import API_VERSION, KINDS, LEGACY_API_VERSION, RequestRules, RuleSet
from tests.fuzz.conftest import ForSeconds

MAX_LINE = 1000

NOISE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["pool", "o", "m", "2026-01-01T00:00:00Z", "Exact", "", "é" * 300]),
    st.dates(),
    st.lists(st.integers(), max_size=2),
)


def parts(sound: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    known = {key: st.one_of(one, one, one, NOISE) for key, one in sound.items()}
    return st.one_of(
        st.fixed_dictionaries(sound),
        st.fixed_dictionaries(known),
        st.fixed_dictionaries({}, optional=known | {"surprise": NOISE}),
    )


NAMES = st.sampled_from(["o", "p", "a.b-c", "Bad_", "x" * 254])
META = parts(
    {
        "name": NAMES,
        "namespace": st.sampled_from(["default", "n"]),
        "creationTimestamp": st.sampled_from(
            ["2026-01-01T00:00:00Z", "1969-07-20T20:17:40Z", "no"]
        ),
    }
)
REFERENCE = parts({"name": st.sampled_from(["pool", "pool", "pool", "other"])})
MATCHES = st.lists(
    parts({"model": parts({"type": st.just("Exact"), "value": st.sampled_from(["m", "n", "é"])})}),
    max_size=3,
)
TARGETS = st.lists(
    parts({"modelRewrite": st.sampled_from(["t", "u", ""]), "weight": st.integers(-1, 1_000_001)}),
    max_size=3,
)
RULES = st.lists(parts({"matches": MATCHES, "targets": TARGETS}), max_size=3)
SPEC = parts({"poolRef": REFERENCE, "priority": st.integers(-(2**32), 2**32)})
REWRITE_SPEC = parts({"poolRef": REFERENCE, "rules": RULES})
HEAD = {"apiVersion": st.sampled_from([API_VERSION, API_VERSION, LEGACY_API_VERSION, "v1"])}
OBJECTS = st.one_of(
    parts(HEAD | {"kind": st.just("InferenceObjective"), "metadata": META, "spec": SPEC}),
    parts(
        HEAD | {"kind": st.just("InferenceModelRewrite"), "metadata": META, "spec": REWRITE_SPEC}
    ),
    parts(HEAD | {"kind": st.sampled_from([*KINDS, "Pod"]), "metadata": META, "spec": NOISE}),
)
DOCUMENTS = st.one_of(
    OBJECTS,
    parts(
        {
            "apiVersion": st.just("v1"),
            "kind": st.just("List"),
            "items": st.lists(OBJECTS, max_size=3),
        }
    ),
    st.fixed_dictionaries({"endpoints": st.lists(NOISE, max_size=3)}),
    NOISE,
)
SNIPPETS = st.sampled_from(
    [
        *("\n---\n", "kind: ", "InferenceObjective", "InferenceModelRewrite", "List", "\nitems:"),
        *("endpoints:", "\nendpoints: []", "\nspec: ", "\n- ", "{", "}", "[", "]", ", ", "é", "\t"),
        *("name: a", "port: ", "address: 10.0.0.1", "poolRef: {name: pool}", "apiVersion: v1\n"),
        *("\nmetadata: {name: a}", "&x ", "*x", "<<: ", "? ", "|", "...", "!!bool x", "\0"),
        *("!!python/object:os.system ", "!!binary aGk=", "%YAML 9.9\n", "1:2:3", "2001-99-99"),
        *("0x" + "f" * 5000, "9" * 5000, "\udc80"),
    ]
)


def is_sound(rules: RuleSet) -> bool:
    used, rng = RequestRules(), Random(0)
    used.use(rules)
    for model in ("m", "n", "é", ""):
        if used.rules is not None:
            used.rules.apply(model, rng)
    names = [one.name for one in rules.objectives]
    sent = msgspec.msgpack.encode(rules)
    return (
        len(names) == len(set(names))
        and all(-(2**31) <= priority < 2**31 for priority in rules.priorities)
        and all(rule.targets for rule in rules.rewrites)
        and all(
            target.weight is None or 1 <= target.weight <= 1_000_000
            for rule in rules.rewrites
            for target in rule.targets
        )
        and msgspec.msgpack.decode(sent, type=RuleSet) == rules
    )


def read_or_refuse(content: bytes) -> PoolFile | None:
    found: PoolFile | None = None
    for read in (read_policies, read_pool_file):
        refusal = ""
        try:
            found = read(content, "f", "pool")
        except ConfigError as error:
            found, refusal = None, str(error)
        if found is None:
            assert refusal.startswith("f:")
            assert "\n" not in refusal
            continue
        assert is_sound(found.contents.rules)
        errors = [one for one in found.findings if one.severity is Severity.ERROR]
        assert bool(errors) == bool(found.contents.num_skipped)
        assert len(found.findings) <= MAX_FINDINGS + 1
        lines = list(map(str, found.findings))
        assert all(line.startswith("f") and line.isprintable() for line in lines)
        assert max(map(len, lines), default=0) < MAX_LINE
    return found


def test_objects_of_any_shape_are_read_or_reported(for_seconds: ForSeconds) -> None:
    def check(documents: list[Any]) -> None:
        listed = [{"endpoints": []}, *documents]
        read_or_refuse(yaml.safe_dump_all(listed, allow_unicode=True).encode())
        read_or_refuse(yaml.safe_dump_all(documents, allow_unicode=True).encode())

    for_seconds(st.lists(DOCUMENTS, max_size=4), check)


def test_text_that_looks_like_objects_is_read_or_refused(for_seconds: ForSeconds) -> None:
    text = st.lists(SNIPPETS, max_size=25).map(
        lambda pieces: "".join(pieces).encode(errors="surrogateescape")
    )
    for_seconds(st.one_of(text, st.binary(max_size=64)), read_or_refuse)
