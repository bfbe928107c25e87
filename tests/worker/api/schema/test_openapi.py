"""The document says what the server does."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import schemathesis

from worker.api.schema.openapi import document, document_bytes
from worker.api.schema.routes import Route, all_routes

DOCUMENT = document(all_routes(), has_keys=True)


def test_the_document_is_valid() -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.validate()
    assert schema.specification.version == "3.1.0"
    for name, component in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(component)
        assert component["description"], name


def test_every_route_is_described() -> None:
    described = {(p, m.upper()) for p, path in DOCUMENT["paths"].items() for m in path}
    assert described == {(r.path, r.method) for r in all_routes()}
    operations = [o for path in DOCUMENT["paths"].values() for o in path.values()]
    assert len({o["operationId"] for o in operations}) == len(operations) == len(all_routes())
    for operation in operations:
        statuses = set(operation["responses"])
        assert {"200", "400", "408", "431", "500"} <= statuses
        assert ("413" in statuses) is ("requestBody" in operation)
        assert ("401" in statuses) is ("security" in operation)


TOOLS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def body_schema(name: str) -> dict[str, Any]:
    schemas = DOCUMENT["components"]["schemas"]
    return {**schemas[name], "components": {"schemas": schemas}}


@pytest.mark.parametrize(
    ("name", "body", "right"),
    [
        ("CompletionRequest", {"prompt": "a"}, True),
        ("CompletionRequest", {}, False),
        ("CompletionRequest", {"prompt": "a", "unknown": 1}, False),
        ("CompletionRequest", {"prompt": "a", "temperature": 2}, True),
        ("CompletionRequest", {"prompt": "a", "temperature": 2.1}, False),
        ("CompletionRequest", {"prompt": "a", "top_p": 0}, False),
        ("CompletionRequest", {"prompt": "a", "n": 17}, False),
        ("CompletionRequest", {"prompt": "a", "stop": ""}, False),
        ("CompletionRequest", {"prompt": "a", "stop": ["x"] * 17}, False),
        ("CompletionRequest", {"prompt": "a", "cache_salt": "a/b"}, False),
        ("CompletionRequest", {"prompt": "a", "suffix": "b"}, False),
        ("CompletionRequest", {"prompt": "a", "suffix": ""}, True),
        ("ChatRequest", {"messages": []}, False),
        ("ChatRequest", {"messages": [{"role": "king", "content": "a"}]}, False),
        ("ChatRequest", {"messages": [{"role": "user"}]}, False),
        ("ChatRequest", {"messages": [{"role": "assistant", "reasoning": "a"}]}, True),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a"}], "tools": []}, True),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, False),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a"}]}, True),
        ("ChatRequest", {**TOOLS, "tool_choice": "none"}, True),
        ("ChatRequest", {**TOOLS, "tool_choice": "some"}, False),
        ("GenerateRequest", {"token_ids": [1], "sampling_params": {"top_k": -2}}, False),
        ("GenerateRequest", {"token_ids": [-1]}, False),
    ],
)
async def test_bounds_are_the_servers_own(
    bench: Any, name: str, body: dict[str, Any], right: bool
) -> None:
    validator = jsonschema.Draft202012Validator(body_schema(name))
    assert validator.is_valid(body) is right
    path = {
        "CompletionRequest": "/v1/completions",
        "ChatRequest": "/v1/chat/completions",
        "GenerateRequest": "/inference/v1/generate",
    }[name]
    async with bench.client(strict_fields=True) as client:
        assert ((await client.post(path, json=body)).status_code == 200) is right


async def test_the_served_document_is_of_this_server(bench: Any) -> None:
    async with bench.client() as client:
        plain = (await client.get("/openapi.json")).json()
    async with bench.client(enable_admin_routes=True, api_keys=["k"]) as client:
        full = (await client.get("/openapi.json")).json()
    assert "/sleep" not in plain["paths"]
    assert "/sleep" in full["paths"]
    assert "securitySchemes" not in plain["components"]
    assert full["paths"]["/sleep"]["post"]["security"] == [{"bearer": []}]
    assert "/openapi.json" in plain["paths"]


async def test_the_document_is_built_once_when_it_is_first_requested(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[int] = []

    def counted(routes: Iterable[Route], *, has_keys: bool) -> bytes:
        builds.append(threading.get_ident())
        return document_bytes(routes, has_keys=has_keys)

    monkeypatch.setattr("worker.api.server.document_bytes", counted)
    async with bench.client() as client:
        assert builds == []
        together = await asyncio.gather(*(client.get("/openapi.json") for _ in range(2)))
        answers = [*together, await client.get("/openapi.json")]
    assert len(builds) == 1
    assert builds[0] != threading.get_ident()  # the event loop runs meanwhile
    assert len({answer.content for answer in answers}) == 1


def test_the_document_can_be_printed() -> None:
    command = [sys.executable, "-m", "worker.api.schema.openapi"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    assert msgspec.json.decode(printed) == msgspec.json.decode(msgspec.json.encode(DOCUMENT))


def test_the_documentation_has_every_route() -> None:
    page = (Path(__file__).parents[4] / "docs/http-api.md").read_text()
    table = page.partition("## Routes")[2].partition("## Headers")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([A-Z, ]+) \|", table, re.MULTILINE)
    written = {(path, method) for path, methods in rows for method in methods.split(", ")}
    assert written == {(route.path, route.method) for route in all_routes()}
