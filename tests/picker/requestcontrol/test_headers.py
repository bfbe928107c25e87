"""Names that belong to the system, and which of two names counts."""

import pytest

from picker.requestcontrol import headers
from picker.requestcontrol.headers import DISAGGREGATION, PICKER_OWNED, SYSTEM_OWNED, first_of

ALIASED = (
    headers.FAIRNESS_ID,
    headers.OBJECTIVE,
    headers.MODEL_REWRITE,
    headers.SLO_TTFT_MS,
    headers.SLO_TPOT_MS,
)


@pytest.mark.parametrize("names", ALIASED, ids=lambda names: str(names[0]))
def test_the_new_name_wins_over_the_old_one(names: tuple[str, str]) -> None:
    new, old = names
    assert first_of({old: "old", new: "new"}, names) == "new"
    assert first_of({old: "old", new: ""}, names) == "old"
    assert first_of({old: "old"}, names) == "old"
    assert first_of({}, names) == ""


def test_both_names_of_everything_are_owned() -> None:
    assert {name for names in ALIASED for name in names} <= set(SYSTEM_OWNED)
    assert len(set(PICKER_OWNED)) == len(PICKER_OWNED)
    assert all(name == name.lower() for name in PICKER_OWNED)


def test_addresses_of_disaggregation_are_a_pickers_word_alone() -> None:
    """An endpoint would connect to these addresses; what it answers with is its own business."""
    assert set(DISAGGREGATION) == set(PICKER_OWNED) - set(SYSTEM_OWNED)


@pytest.mark.parametrize(
    "name", ["x-request-id", "content-length", "x-session-token", "traceparent", ":path"]
)
def test_headers_of_the_client_are_not_owned(name: str) -> None:
    assert name not in PICKER_OWNED
