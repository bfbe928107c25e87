"""disaggregatedset-rollout-screener: one revision per request, by weight or by header."""

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight, ResponseHeadHook, Screener
from picker.types import Candidate, ResponseHead, SchedulingResult
from tests.support.picker.plugin_scenes import configured, placed, request_for, scores

make = partial(configured, "disaggregatedset-rollout-screener")

NAME, REVISION, ROLE, SLICE = (
    f"disaggregatedset.x-k8s.io/{word}" for word in ("name", "revision", "role", "slice")
)
SELECTORS = [
    {"name": "revision", "headerName": "X-Disagg-Revision", "labelKey": REVISION, "mode": "strict"},
    {"name": "slice", "headerName": "x-disagg-slice", "labelKey": SLICE, "mode": "prefer"},
]


def parameters(mode: str = "sum", *roles: str, **more: Any) -> dict[str, Any]:
    gating: dict[str, Any] = {"mode": mode}
    if mode != "disabled":
        gating["requireRoles"] = {"values": list(roles or ("prefill", "decode"))}
    scope = {"labelSelector": f"{NAME}=s"}
    return {"scope": scope, "headerSelectors": SELECTORS, "revisionGating": gating, **more}


def rollout(**revisions: tuple[int, int]) -> list[Candidate]:
    """`rollout(a=(2, 9), b=(1, 1))` has these numbers of prefill and decode endpoints in each
    revision.
    """
    return [
        placed(f"{revision}-{role}-{index}", {NAME: "s", REVISION: revision, ROLE: role})
        for revision, counts in revisions.items()
        for role, count in zip(("prefill", "decode"), counts, strict=True)
        for index in range(count)
    ]


def shares(screener: Any, candidates: list[Candidate], times: int = 2000) -> dict[str, float]:
    rng, counts = Random(5), Counter[str]()
    for _ in range(times):
        passed = screener.screen(request_for(), candidates, rng)
        (revision,) = {one.endpoint.labels[REVISION] for one in passed}
        assert passed == [one for one in candidates if one.endpoint.labels[REVISION] == revision]
        counts[revision] += 1
    return {revision: count / times for revision, count in counts.items()}


@pytest.mark.parametrize(
    ("mode", "roles", "revisions", "expected"),
    [
        ("sum", (), {"a": (2, 9), "b": (1, 1)}, {"a": 11 / 13, "b": 2 / 13}),
        ("max-role", (), {"a": (2, 9), "b": (1, 1)}, {"a": 0.9, "b": 0.1}),
        ("max-role", (), {"a": (1, 6), "b": (1, 4)}, {"a": 0.6, "b": 0.4}),
        ("max-role", ("prefill", "decode"), {"a": (3, 1), "b": (1, 3)}, {"a": 0.75, "b": 0.25}),
        ("max-role", ("decode", "prefill"), {"a": (3, 1), "b": (1, 3)}, {"a": 0.25, "b": 0.75}),
        ("sum", ("decode",), {"a": (5, 1), "b": (0, 3)}, {"a": 0.25, "b": 0.75}),
        ("sum", (), {"a": (1, 8), "b": (0, 9)}, {"a": 1.0}),
        ("max-role", (), {"a": (1, 1), "b": (9, 0), "c": (1, 1)}, {"a": 0.5, "c": 0.5}),
    ],
)
def test_complete_revisions_are_drawn_by_weight(
    mode: str,
    roles: tuple[str, ...],
    revisions: dict[str, tuple[int, int]],
    expected: dict[str, float],
) -> None:
    screener = make(parameters(mode, *roles))
    assert isinstance(screener, Screener)
    drawn = shares(screener, rollout(**revisions))
    assert drawn.keys() == expected.keys()
    assert drawn == pytest.approx(expected, abs=0.04)


def test_without_a_complete_revision_no_endpoint_remains() -> None:
    screener = make(parameters())
    split = rollout(a=(2, 0), b=(0, 2))
    assert not screener.screen(request_for(), split, Random(1))
    assert not screener.screen(request_for(), [], Random(1))


def test_a_strict_header_chooses_its_revision() -> None:
    screener, candidates = (make(parameters()), rollout(a=(2, 9), b=(1, 1), c=(0, 3)))

    def passed(value: str) -> set[str]:
        request = replace(request_for(), headers={"x-disagg-revision": value})
        answer = screener.screen(request, candidates, Random(1))
        return {one.endpoint.labels[REVISION] for one in answer}

    assert passed("b") == {"b"}
    assert passed("c") == set()
    assert passed("z") == set()
    assert len(passed("")) == 1


def test_a_preferred_header_excludes_no_endpoint() -> None:
    screener = make(parameters())
    request = replace(request_for(), headers={"x-disagg-slice": "7"})
    assert len(screener.screen(request, rollout(a=(2, 3)), Random(1))) == 5


def test_other_strict_labels_narrow_within_the_revision() -> None:
    selectors = [{**SELECTORS[1], "mode": "strict"}]
    screener = make({**parameters(), "headerSelectors": selectors})
    candidates = [
        placed(f"{revision}{role}{part}", {NAME: "s", REVISION: revision, ROLE: role, SLICE: part})
        for revision, parts in (("a", "12"), ("b", "2"))
        for role in ("prefill", "decode")
        for part in parts
    ]
    request = replace(request_for(), headers={"x-disagg-slice": "1"})
    for seed in range(20):
        passed = screener.screen(request, candidates, Random(seed))
        assert [one.endpoint.name for one in passed] == ["aprefill1", "adecode1"]


def test_two_strict_headers_about_one_label_have_to_agree() -> None:
    """An endpoint cannot have two revisions."""
    other = {**SELECTORS[0], "name": "other", "headerName": "x-other-revision"}
    screener = make({**parameters(), "headerSelectors": [*SELECTORS, other]})
    candidates = rollout(a=(1, 1), b=(1, 1))

    def passed(one: str, two: str) -> set[str]:
        headers = {"x-disagg-revision": one, "x-other-revision": two}
        answer = screener.screen(replace(request_for(), headers=headers), candidates, Random(1))
        return {candidate.endpoint.labels[REVISION] for candidate in answer}

    assert passed("a", "a") == {"a"}
    assert passed("a", "b") == passed("b", "a") == set()


def test_selectors_work_without_gating() -> None:
    screener = make(parameters("disabled"))
    candidates = rollout(a=(2, 0), b=(0, 1))
    assert screener.screen(request_for(), candidates, Random(1)) == candidates
    request = replace(request_for(), headers={"x-disagg-revision": "b"})
    assert screener.screen(request, candidates, Random(1)) == candidates[2:]


def test_only_endpoints_of_the_scope_are_counted() -> None:
    outside = placed("outside", {NAME: "other", REVISION: "b", ROLE: "prefill"})
    nameless = placed("nameless", {NAME: "s", ROLE: "prefill"})
    candidates = [*rollout(a=(1, 1), b=(0, 5)), outside, nameless]
    screener = make(parameters())
    for seed in range(20):
        passed = screener.screen(request_for(), candidates, Random(seed))
        assert [one.endpoint.name for one in passed] == ["a-prefill-0", "a-decode-0"]


def test_the_labels_are_configurable() -> None:
    gating = {
        "mode": "sum",
        "revisionLabelKey": "rev",
        "roleLabelKey": "role",
        "requireRoles": {"values": ["decode"]},
    }
    screener = make(parameters(revisionGating=gating))
    candidates = [placed("x", {NAME: "s", "rev": "1", "role": "decode"}), placed("y", {NAME: "s"})]
    passed = screener.screen(request_for(), candidates, Random(1))
    assert [one.endpoint.name for one in passed] == ["x"]


def test_responses_report_the_labels_of_their_endpoint() -> None:
    screener = make(parameters("disabled"))
    assert isinstance(screener, ResponseHeadHook)

    def reported(**labels: str) -> object:
        keys = {"revision": REVISION, "slice": SLICE}
        endpoint = placed("w", {keys[word]: value for word, value in labels.items()}).endpoint
        decided = SchedulingResult((endpoint,), "decode")
        return screener.response_head(
            Flight(request_for(), decided, Attributes()), ResponseHead(200)
        )

    assert reported(revision="a", slice="7") == {"x-disagg-revision": "a", "x-disagg-slice": "7"}
    assert reported(revision="a") == {"x-disagg-revision": "a"}
    assert reported() == {}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-slice": "a"}, [1.0, 0.0, 0.0, 0.0]),
        ({"x-slice": ""}, [0.0, 0.0, 0.0, 1.0]),
        ({"x-slice": "A"}, [0.0] * 4),
        ({"x-other": "a"}, [0.0] * 4),
    ],
)
def test_header_label_affinity(headers: dict[str, str], expected: list[float]) -> None:
    labels: list[dict[str, str]] = [{"slice": "a"}, {"slice": "b"}, {"other": "a"}, {"slice": ""}]
    candidates = [placed(labels=each) for each in labels]
    parameters = {"headerName": "X-Slice", "labelKey": "slice"}
    said = scores("header-label-affinity-scorer", candidates, None, parameters, headers)
    assert said == expected
