"""The one table of refusals."""

import json
import re
from http import HTTPStatus
from pathlib import Path

import pytest

from picker.errors import (
    HTTP_STATUS,
    Code,
    DropReason,
    ErrorForm,
    RefusedError,
    bad_request,
    form_of,
    no_endpoints,
)

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_every_code_has_a_status_of_its_own() -> None:
    assert set(HTTP_STATUS) == set(Code)
    assert len(set(HTTP_STATUS.values())) == len(Code)
    assert all(HTTPStatus(status) >= 400 for status in HTTP_STATUS.values())


def test_a_refusal_has_the_words_of_the_reference_for_conformance() -> None:
    refusal = no_endpoints()
    body, headers = refusal.answer(ErrorForm.REFERENCE)
    assert (refusal.status, body) == (
        503,
        "inference error: ServiceUnavailable - failed to find endpoint candidates for serving the "
        "request",
    )
    assert headers == (("x-llm-d-request-dropped-reason", "rejected-no-endpoints"),)
    assert bad_request("why").answer(ErrorForm.REFERENCE) == (
        *("inference error: BadRequest - why", ()),
    )
    assert str(bad_request("why")) == "why"


@pytest.mark.parametrize(
    ("path", "content_type", "form"),
    [
        ("/v1/messages", "application/json", ErrorForm.ANTHROPIC),
        ("/llama/v1/messages/", "", ErrorForm.ANTHROPIC),
        ("/v1/messages/count_tokens", "", ErrorForm.ANTHROPIC),
        ("/v1/messages/batches", "", ErrorForm.OPENAI),
        ("/v1/models", "", ErrorForm.OPENAI),
        ("/v1/messages", "application/grpc+proto", ErrorForm.PLAIN),
    ],
)
def test_the_form_is_that_of_the_api(path: str, content_type: str, form: ErrorForm) -> None:
    assert form_of(path, content_type) is form


TYPES = {
    Code.BAD_REQUEST: ("BadRequestError", "invalid_request_error"),
    Code.UNAUTHORIZED: ("AuthenticationError", "authentication_error"),
    Code.FORBIDDEN: ("PermissionDeniedError", "permission_error"),
    Code.NOT_FOUND: ("NotFoundError", "not_found_error"),
    Code.PRECONDITION_FAILED: ("Precondition Failed", "invalid_request_error"),
    Code.PAYLOAD_TOO_LARGE: ("Request Entity Too Large", "request_too_large"),
    Code.UNSUPPORTED_MEDIA_TYPE: ("Unsupported Media Type", "invalid_request_error"),
    Code.RESOURCE_EXHAUSTED: ("RateLimitError", "rate_limit_error"),
    Code.HEADERS_TOO_LARGE: ("Request Header Fields Too Large", "invalid_request_error"),
    Code.INTERNAL: ("InternalServerError", "api_error"),
    Code.SERVICE_UNAVAILABLE: ("Service Unavailable", "overloaded_error"),
}


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.value)
def test_every_code_has_a_type_in_either_api(code: Code) -> None:
    """OpenAI's types are those of the worker, whose answers come through the same proxy."""
    refusal = RefusedError(code, "a \ud800 is wrong", param="p")
    openai, anthropic = (
        json.loads(refusal.answer(form)[0]) for form in (ErrorForm.OPENAI, ErrorForm.ANTHROPIC)
    )
    said = {"message": "A \ud800 is wrong", "type": TYPES[code][0], "param": "p"}
    assert openai == {"error": {**said, "code": refusal.status}}
    detail = {"type": TYPES[code][1], "message": "A \ud800 is wrong"}
    assert anthropic == {"type": "error", "error": detail}


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.value)
def test_the_protocols_page_lists_every_code_with_its_status(code: Code) -> None:
    table = PROTOCOL.read_text().partition("## Errors")[2].partition("## The port")[0]
    row = next(line for line in table.splitlines() if f"`{code.value}`" in line)
    codes = re.findall(r"`(\w+)`", row.split("|")[1])
    statuses = [int(number) for number in re.findall(r"\d+", row.split("|")[2])]
    assert statuses[codes.index(code.value)] == RefusedError(code, "").status


@pytest.mark.parametrize("reason", list(DropReason), ids=lambda reason: reason.value)
def test_the_protocols_page_lists_every_reason(reason: DropReason) -> None:
    assert f"`{reason.value}`" in PROTOCOL.read_text()
