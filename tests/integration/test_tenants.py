"""Tenants behind a generated bootstrap: real Envoy, real picker, and answers of a scripted pod."""

import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from base.response_bodies import ResponseBodies
from fleet.envoy.bootstrap import build, to_yaml
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from fleet.envoy.tenants import read_tenants
from tests.support.fleet.envoy_process import EnvoyProcess
from tests.support.fleet.running_fleet import Fleet, ready_fleet
from tests.support.local_ports import free_port
from tests.support.picker.metrics_pages import Pod, page
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker
from tests.support.waiting import until
from tests.support.web_server import for_all_paths, runner_of

pytestmark = pytest.mark.envoy
LOCAL = "127.0.0.1"
ISSUER = "https://login.example"
SECRET = b"0123456789abcdef0123456789abcdef"
ACME, SLOW = "sk-acme-0123456789", "sk-slow-0123456789"
FAIRNESS = "x-gateway-inference-fairness-id"
TENANTS = """\
tenants:
- name: acme
  keys: [{env: ACME_KEY}]
  objective: gold
  tokensPerMinute: 600
- {name: slow, keys: [{file: slow.key}], requestsPerMinute: 2}
- {name: research, claim: team-r, models: [{name: m, tokensPerMinute: 6}]}
jwt: {issuer: "https://login.example", claim: team.name, jwks: {url: "http://localhost:PORT/keys"}}
"""
CONFIG = f"{HEAD}plugins: [{{type: queue-scorer}}]\nrequestHandler: {{propagatePriority: true}}\n"


def signed(**claims: Any) -> str:
    def encoded(part: bytes) -> str:
        return base64.urlsafe_b64encode(part).rstrip(b"=").decode()

    given = {"iss": ISSUER, "exp": int(time.time()) + 600, "team": {"name": "team-r"}} | claims
    head = {"alg": "HS256", "typ": "JWT", "kid": "k"}
    text = ".".join(encoded(json.dumps(part).encode()) for part in (head, given))
    return f"{text}.{encoded(hmac.digest(SECRET, text.encode(), hashlib.sha256))}"


@dataclass
class Answer:
    status: int
    headers: Any
    body: Any

    @property
    def error(self) -> tuple[int, str, str]:
        assert self.headers["content-type"] == "application/json"
        assert list(self.body) == ["error"]
        assert sorted(self.body["error"]) == ["code", "message", "param", "type"]
        error = self.body["error"]
        assert int(error["code"]) == self.status
        return self.status, error["type"], error["message"]


@dataclass
class Scene:
    picker: WholePicker
    url: str
    worker: "Worker"

    async def post(self, path: str = "/v1/chat/completions", /, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"model": "m", "messages": [], "stream": path == "/v1/completions"}
        async with self.picker.http.post(f"{self.url}{path}", json=body, headers=named) as reply:
            text = await reply.text()
            is_json = "json" in reply.headers.get("content-type", "")
            return Answer(reply.status, reply.headers, json.loads(text) if is_json else text)

    async def as_tenant(self, key: str, path: str = "/v1/chat/completions", /, **headers: str):
        return await self.post(path, authorization=f"Bearer {key}", **headers)


class Worker:
    """Reports a usage of 7 and 5 tokens, of a stream only when asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(text=page(0, 0.1))
        if request.path == "/keys":
            key = base64.urlsafe_b64encode(SECRET).rstrip(b"=").decode()
            return web.json_response(
                {"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": key}]}
            )
        if request.method == "GET":
            return web.Response()
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((headers, body))
        usage = {"usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}
        if not body["stream"]:
            return web.json_response(usage)
        is_asked = body.get("stream_options") == {"include_usage": True}
        events = [{"choices": []}, *([usage] if is_asked else [])]
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in events)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    worker, port = Worker(), free_port()
    runner = runner_of(for_all_paths(worker.answer))
    await runner.setup()
    await web.TCPSite(runner, LOCAL, port).start()
    (folder / "slow.key").write_text(f"{SLOW}\n")
    (folder / "tenants.yaml").write_text(TENANTS.replace("PORT", str(port)))
    tenants = read_tenants(folder / "tenants.yaml", {"ACME_KEY": ACME})
    pod = Pod("pod", LOCAL, page(0, 0.1), port=port)
    usage = ResponseBodies.USAGE
    try:
        async with whole_picker(
            folder, config=CONFIG, objectives={"gold": 3}, response_bodies=usage, token_limits=True
        ) as picker:
            picker.list_endpoints([pod])
            await until(picker.has_read_pages)
            config = BootstrapConfig(
                listen=SocketAddress(LOCAL, free_port()),
                admin=SocketAddress(LOCAL, free_port()),
                picker=SocketAddress(LOCAL, picker.ports.grpc),
                picker_health=SocketAddress(LOCAL, picker.ports.health),
                endpoints=(SocketAddress(LOCAL, port),),
                buffer_request_body=True,
                message_timeout_seconds=60.0,
                response_bodies=usage,
                welcome="welcome",
                tenants=tenants,
            )
            envoy = EnvoyProcess(folder, config.admin.port)
            try:
                await envoy.start(to_yaml(build(config)))
                await envoy.until_ready()
                await envoy.until_healthy("picker", 1)
                await envoy.until_healthy("pool", 1)
                yield Scene(picker, config.listen.url, worker)
            finally:
                await envoy.stop()
    finally:
        await runner.cleanup()


async def test_tenants_are_who_their_keys_say_and_use_what_they_may(tmp_path: Path) -> None:
    """One Envoy for all claims: a start costs more than all requests together."""
    async with scene(tmp_path) as s:
        await _refused_without_a_valid_credential(s)
        await _identified(s)
        await _limited_in_tokens(s)
        await _limited_in_requests(s)


async def _refused_without_a_valid_credential(s: Scene) -> None:
    forged = {"x_gateway_inference_fairness_id": "acme", "x_llm_d_inference_fairness_id": "acme"}
    unknown = "Client authentication failed."
    expired = signed(exp=1)
    for answer, message in (
        (await s.post(), unknown),
        (await s.post(**forged), unknown),
        (await s.as_tenant("sk-unknown-0123456789"), unknown),
        (await s.as_tenant(expired), "Jwt is expired"),
        (await s.as_tenant(signed(iss="https://other")), "Jwt issuer is not configured"),
        (await s.as_tenant(signed()[:-6] + "AAAAAA"), "Jwt verification fails"),
        # The form of the credential decides who checks it, not another header beside it.
        (await s.as_tenant(expired, x_api_key=ACME), "Jwt is expired"),
    ):
        assert answer.error == (401, "AuthenticationError", message)
    stranger = await s.as_tenant(signed(team={"name": "other"}))
    text = "The credential names no tenant of this gateway"
    assert stranger.error == (403, "PermissionDeniedError", text)
    anthropic = await s.post("/v1/messages", x_api_key="sk-unknown-0123456789")
    error = {"type": "authentication_error", "message": unknown}
    assert (anthropic.status, anthropic.body) == (401, {"type": "error", "error": error})
    assert s.worker.seen == []
    async with aiohttp.ClientSession() as client, client.get(f"{s.url}/") as page_of_all:
        assert await page_of_all.text() == "welcome"


async def _identified(s: Scene) -> None:
    forged = {
        "x_gateway_inference_fairness_id": "slow",
        "x_llm_d_inference_fairness_id": "slow",
        "x_llm_d_inference_objective": "other",
        "x_pointsman_token_limit": "999999",
        "x_gateway_token_claim": "team-r",
        "x_vllm_priority": "-99",
    }
    for given in ({"authorization": f"Bearer {ACME}"}, {"x_api_key": ACME}):
        assert (await s.post(**given, **forged)).status == 200
        headers, body = s.worker.seen[-1]
        assert body["priority"] == -3
        assert headers["x-vllm-priority"] == "-3"
        assert headers.keys().isdisjoint(("authorization", "x-api-key", "x-pointsman-token-limit"))
        assert not any(name.startswith(("x-gateway-inf", "x-llm-d-")) for name in headers)
    # Two requests with a usage of 7 and 5, under the name that the key has.
    counted = "llm_d_epp_request_output_tokens_sum"

    async def used() -> float | None:
        return await s.picker.series(counted, fairness_id="acme")

    await until(used, lambda tokens: tokens == 10, what="the usage of acme")
    assert await s.picker.series(counted, fairness_id="slow") is None


async def _limited_in_tokens(s: Scene) -> None:
    """The stream is not asked for its usage by its client."""
    token = signed()

    async def used() -> float | None:
        return await s.picker.series("llm_d_epp_request_input_tokens_sum", fairness_id="research")

    stream = await s.as_tenant(token, "/v1/completions")
    assert (stream.status, "usage" in stream.body) == (200, True)
    await until(used, lambda tokens: tokens == 7, what="the usage of research")
    refused = await s.as_tenant(token)
    text = "'research' has used its 6 tokens a minute of model 'm'"
    assert refused.error == (429, "RateLimitError", text)
    assert int(refused.headers["retry-after"]) in range(50, 62)  # 6 of 12 are left, at 6 a minute
    name = "llm_d_epp_request_error_total"
    assert await s.picker.series(name, fairness_id="research", error_code="ResourceExhausted") == 1
    assert (await s.as_tenant(ACME)).status == 200


async def _limited_in_requests(s: Scene) -> None:
    statuses = [(await s.as_tenant(SLOW)).status for _ in range(2)]
    assert statuses == [200, 200]
    refused = await s.as_tenant(SLOW)
    text = "The tenant has used its requests a minute: local_rate_limited"
    assert refused.error == (429, "RateLimitError", text)
    assert int(refused.headers["retry-after"]) in range(1, 61)
    assert refused.headers["x-ratelimit-limit"] == "2"
    acme = await s.as_tenant(ACME)
    assert (acme.status, "x-ratelimit-limit" in acme.headers) == (200, False)


@pytest.mark.full
async def test_a_fleet_with_tenants_is_ready_and_counts_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: [{{name: acme, keys: [{{value: {ACME}}}], tokensPerMinute: 60}}]")
    async with ready_fleet("--workers", "1", "--tenants", str(file)) as fleet:
        assert f"curl -N {fleet.url}" in fleet.output
        assert 'authorization: Bearer $KEY"' in fleet.output
        with pytest.raises(openai.AuthenticationError):
            await fleet.say_hello()
        fleet.openai.api_key = ACME
        assert await fleet.say_hello() == 4
        with pytest.raises(openai.RateLimitError) as refused:
            await _hellos(fleet, 60)  # each uses one token at least
        assert refused.value.body["message"] == "'acme' has used its 60 tokens a minute"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        await fleet.interrupt()


async def _hellos(fleet: Fleet, count: int) -> None:
    for _ in range(count):
        await fleet.say_hello()
