"""The one table of refusals."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from pathlib import Path

import pytest

from picker.errors import (
    HTTP_STATUS,
    Code,
    DropReason,
    RefusedError,
    bad_request,
    enveloped,
    no_endpoints,
)

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_every_code_has_a_status_of_its_own() -> None:
    """Clients can tell them apart, and each is an error that HTTP knows."""
    assert set(HTTP_STATUS) == set(Code)
    assert len(set(HTTP_STATUS.values())) == len(Code)
    assert all(HTTPStatus(status) >= 400 for status in HTTP_STATUS.values())


def test_a_refusal_is_worded_as_clients_of_the_reference_know_it() -> None:
    """Code and message in the body, the reason in a header, where there is one."""
    refusal = no_endpoints()
    assert (refusal.status, refusal.body) == (
        503,
        "inference error: ServiceUnavailable - failed to find endpoint candidates for serving the "
        "request",
    )
    assert refusal.headers == (("x-llm-d-request-dropped-reason", "rejected-no-endpoints"),)
    assert bad_request("why").headers == ()
    assert str(bad_request("why")) == "why"


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/messages", 400, "invalid_request_error"),
        ("/llama/v1/messages/", 429, "rate_limit_error"),
        ("/v1/messages/count_tokens", 503, "overloaded_error"),
        ("/v1/messages", 500, "api_error"),
    ],
)
def test_anthropics_clients_get_errors_in_their_form(path: str, status: int, kind: str) -> None:
    assert json.loads(enveloped(path, status, "why") or "") == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
    }
    assert enveloped("/v1/chat/completions", status, "why") is None


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.value)
def test_the_protocols_page_tells_every_code_with_its_status(code: Code) -> None:
    """In one row, which may hold several."""
    table = PROTOCOL.read_text().partition("## Errors")[2].partition("## The port")[0]
    row = next(line for line in table.splitlines() if f"`{code.value}`" in line)
    codes = re.findall(r"`(\w+)`", row.split("|")[1])
    statuses = [int(number) for number in re.findall(r"\d+", row.split("|")[2])]
    assert statuses[codes.index(code.value)] == RefusedError(code, "").status


@pytest.mark.parametrize("reason", list(DropReason), ids=lambda reason: reason.value)
def test_the_protocols_page_tells_every_reason(reason: DropReason) -> None:
    """Those of queueing and eviction too."""
    assert f"`{reason.value}`" in PROTOCOL.read_text()
