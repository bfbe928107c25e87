"""Two real workers with the sidecar between them: the same answers, also when one of them dies."""

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fleet.proxy.forward import runner_of
from fleet.proxy.sidecar import Sidecar, SidecarOptions
from tests.support.local_ports import free_port
from tests.support.web_server import listening
from tests.support.worker.running_worker import Worker, running_worker
from worker.api.routes.prefill_leg import KEEP_KV

pytestmark = [pytest.mark.soak, pytest.mark.full]

PATH = "/v1/completions"
PROMPTS = [f"{n}: " + " ".join(f"{i} and {i + n}," for i in range(40)) for n in range(1, 9)]


def body(prompt: str, **fields: object) -> dict[str, object]:
    sampling = {"temperature": 0.8 * (int(prompt[0]) % 2), "seed": 5}
    return {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **sampling, **fields}


async def said(worker: Worker, url: str, prompt: str, **headers: str) -> str:
    answer = await worker.http.post(url + PATH, json=body(prompt), headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def external(worker: Worker) -> float:
    counters = await worker.counters()
    (hits,) = [v for k, v in counters.items() if k.startswith("vllm:external_prefix_cache_hits")]
    return hits


async def sidecar_url(stack: AsyncExitStack, decoder: str, connector: str, port: int) -> str:
    options = SidecarOptions("", 0, decoder, connector, port, None, 60.0, 1.0)
    sidecar = await stack.enter_async_context(Sidecar.running(options))
    runner = runner_of(sidecar.handle, 1.0)
    stack.push_async_callback(runner.cleanup)
    return f"http://127.0.0.1:{await listening(runner)}"


async def both(stack: AsyncExitStack, *flags: tuple[str, ...]) -> list[Worker]:
    starting = [stack.enter_async_context(running_worker(*one)) for one in flags]
    return await asyncio.gather(*starting)


async def test_answers_are_the_same_when_the_prefill_fails(model_path: Path) -> None:
    transfer = {"kv_port": 0, "kv_transfer_timeout": 2}
    flags = ["--model", str(model_path), "--kv-cache-memory-bytes", "100000000"]
    flags += ["--max-model-len", "1024", "--kv-transfer-config"]
    async with AsyncExitStack() as stack:
        roles = [{"kv_role": role, **transfer} for role in ("kv_producer", "kv_consumer")]
        first, second = await both(stack, *((*flags, json.dumps(role)) for role in roles))
        alone = [await said(first, "", prompt) for prompt in PROMPTS]
        named = {"x-prefiller-host-port": str(first.http.base_url.netloc.decode())}
        url = await sidecar_url(stack, str(second.http.base_url), "nixlv2", 8998)

        for prompt, expected in zip(PROMPTS[:3], alone[:3], strict=True):
            assert await said(second, url, prompt, **named) == expected
        had = await external(second)
        assert had > 300

        legs = []
        for prompt in PROMPTS[3:6]:
            leg = body(prompt, max_tokens=1, kv_transfer_params=KEEP_KV)
            answer = (await first.http.post(PATH, json=leg)).json()
            legs.append(body(prompt, kv_transfer_params=answer["kv_transfer_params"]))
        engine = first.engine_pid()
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        answer = await second.http.post(PATH, json=legs[0])
        assert answer.json()["choices"][0]["text"] == alone[3]
        first.process.kill()
        await first.exit_status()
        for leg, expected in zip(legs[1:], alone[4:6], strict=True):
            answer = await second.http.post(PATH, json=leg)
            assert answer.json()["choices"][0]["text"] == expected
        for prompt, expected in zip(PROMPTS[6:], alone[6:], strict=True):
            assert await said(second, url, prompt, **named) == expected
        assert await external(second) == had


@pytest.mark.parametrize("way", ["sglang", "pd-proxy", "nixl"])
async def test_other_ways_to_hand_a_prompt_over(way: str) -> None:
    """SGLang's rooms, by the sidecar; the first leg, by the decode worker; bytes, by NIXL, where it
    is installed. Simulators echo what is in their caches.
    """
    kv_port = free_port()
    flags = ["--engine", "sim", "--sim-mode", "echo", "--kv-transfer-config"]
    roles: list[dict[str, object]] = [
        {"kv_role": "kv_producer", "kv_port": kv_port},
        {"kv_role": "kv_consumer", "kv_port": 0},
    ]
    more = [] if way == "sglang" else ["--pd-proxy"]
    if way == "nixl":
        pytest.importorskip("nixl._api")
        roles = [{"kv_connector": "NixlConnector", **role} for role in roles]
    async with AsyncExitStack() as stack:
        giver, taker = ((*flags, json.dumps(role)) for role in roles)
        first, second = await both(stack, giver, (*taker, *more))
        alone = [await said(first, "", prompt) for prompt in PROMPTS]
        url = str(second.http.base_url)
        if way == "sglang":
            url = await sidecar_url(stack, url, "sglang", kv_port)
        named = {"x-prefiller-host-port": first.http.base_url.netloc.decode()}
        answers = [said(second, url, prompt, **named) for prompt in PROMPTS]
        assert await asyncio.gather(*answers) == alone
        assert await external(second) > 1000
