"""Real workers with simulated engines fetch KV from a peer, and hand it over at a drain."""

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.local_ports import free_ports
from tests.support.worker.running_worker import Worker, running_worker

PATH = "/v1/completions"
PROMPT = list(range(100, 180))
BODY = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "seed": 3, "temperature": 1}
FLAGS = ("--engine", "sim", "--sim-mode", "echo", "--block-size", "4", "--kv-transfer-config")


@pytest.fixture(autouse=True)
def patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a handshake takes seconds."""
    patch = "import worker.kv.serving\nworker.kv.serving._HANDSHAKE_SECONDS = 60.0\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def tokens_of(stream: str) -> list[int]:
    lines = [line for line in stream.split("\n") if line.startswith(": resume ")]
    return [token for line in lines for token in json.loads(line.removeprefix(": resume "))]


def text_of(stream: str) -> str:
    events = [line for line in stream.split("\n") if line.startswith("data: {")]
    choices = [one for event in events for one in json.loads(event[6:]).get("choices", ())]
    return "".join(choice["text"] for choice in choices)


async def moved(worker: Worker) -> tuple[float, float]:
    counters = await worker.counters()
    (p2p,) = [v for k, v in counters.items() if "cached_by_source" in k and "p2p" in k]
    (failed,) = [v for k, v in counters.items() if k.startswith("pointsman:kv_transfer_failures")]
    return p2p, failed


async def test_a_worker_fetches_kv_from_the_peer_in_the_header() -> None:
    """An invalid address is refused; a missing peer costs a recompute."""
    first_port, second_port = free_ports(2)
    settings = [{"kv_port": first_port}, {"kv_port": second_port, "kv_peer_port": first_port}]
    async with (
        running_worker(*FLAGS, json.dumps(settings[0])) as first,
        running_worker(*FLAGS, json.dumps(settings[1])) as second,
    ):
        expected = (await first.http.post(PATH, json=BODY)).json()["choices"]
        named = {"x-kv-cache-source-host-port": first.http.base_url.netloc.decode()}
        answer = (await second.http.post(PATH, json=BODY, headers=named)).json()
        assert answer["choices"][0]["text"] == expected[0]["text"]
        # 19 whole blocks of 79 tokens: the last token must be computed.
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 76}
        assert await moved(second) == (76, 0)
        # Without `kv_peer_port` the port follows from this worker's, and no peer listens there.
        other = {**BODY, "prompt": [5, *PROMPT]}
        named = {"x-kv-cache-source-host-port": "127.0.0.1:1"}
        assert (await first.http.post(PATH, json=other, headers=named)).status_code == 200
        assert await moved(first) == (0, 1)
        bad = {"x-kv-cache-source-host-port": "localhost:80"}
        refused = await second.http.post(PATH, json=BODY, headers=bad)
        assert refused.status_code == 400
        assert "x-kv-cache-source-host-port must be" in refused.json()["error"]["message"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_stream_moves_with_its_kv_when_its_worker_drains(end: signal.Signals) -> None:
    kv = '{"kv_port": 0, "kv_lease_duration": 600, "kv_transfer_timeout": 120}'
    slow = ("--sim-decode-base-ms", "200ms", *FLAGS, kv)
    fast = ("--sim-time-scale", "0", "--enable-admin-routes", *FLAGS, kv)
    async with running_worker(*slow) as first, running_worker(*fast) as second:
        whole = (await second.http.post(PATH, json=BODY)).json()["choices"][0]["text"]
        assert (await second.http.post("/reset_prefix_cache")).json() == {"success": True}
        state, found = await _cut_off(first, end)
        begun = found[: found.rindex(": resume ")]
        resume = {**state, "token_ids": tokens_of(found)}
        if end is signal.SIGKILL:
            await first.exit_status()
        rest = await second.http.post(PATH, json={**BODY, "stream": True, "resume": resume})
        assert text_of(begun) + text_of(rest.text) == whole
        if end is signal.SIGTERM:
            assert await moved(second) == (80, 0)
            assert await first.exit_status() == 0
        else:
            assert await moved(second) == (0, 1)


async def _cut_off(worker: Worker, end: signal.Signals) -> tuple[dict[str, Any], str]:
    found = ""
    body = {**BODY, "stream": True, "resume": {}}
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        async with worker.http.stream("POST", PATH, json=body) as response:
            state: dict[str, Any] = json.loads(response.headers["x-pointsman-resume"])
            async for chunk in response.aiter_text():
                if len(tokens_of(found)) < 20 <= len(tokens_of(found + chunk)):
                    worker.process.send_signal(end)
                found += chunk
    assert 20 <= len(tokens_of(found)) < 100
    return state, found
