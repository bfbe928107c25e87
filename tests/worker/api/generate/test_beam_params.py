"""What a beam search may be asked for."""

from __future__ import annotations

import msgspec
import pytest

from worker.api.generate.beam_params import check_beam_fields, length_penalty
from worker.api.schema.parse import decode
from worker.api.schema.requests import CompletionRequest
from worker.errors import RequestError


def request(**fields: object) -> CompletionRequest:
    """A completion request with some fields."""
    return decode(msgspec.json.encode({"prompt": "x", **fields}), CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_a_beam_search_refuses_what_would_change_a_draw(
    fields: dict[str, object], param: str
) -> None:
    """A field that the search could only ignore is a 400."""
    with pytest.raises(RequestError, match="cannot be used with use_beam_search") as caught:
        check_beam_fields(request(**fields))
    assert caught.value.param == param
    check_beam_fields(request(repetition_penalty=1, min_tokens=0, seed=3, n=4))


def test_the_length_penalty_is_bounded() -> None:
    """A power of a length must be a number."""
    assert length_penalty(request()) == 1.0
    assert length_penalty(request(length_penalty=-100)) == -100
    with pytest.raises(RequestError) as caught:
        length_penalty(request(length_penalty=100.5))
    assert caught.value.param == "length_penalty"
