"""Clients that leave, against a real worker: what they asked for stops within a step or two."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.support.worker.sim_worker import SimWorker, sim_worker

STEP_MS = "150"
ASK = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}


def number(worker: SimWorker, series: str) -> float:
    """A series of the metrics page."""
    page = urllib.request.urlopen(f"{worker.url}/metrics").read().decode()
    return next(float(li.split()[-1]) for li in page.splitlines() if li.startswith(series + "{"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine(stream: bool) -> None:
    """No more than two steps run after the connection is closed, and the cache is free again."""
    flags = ("--sim-time-scale", "1", "--sim-decode-base-ms", STEP_MS)
    with sim_worker(*flags) as worker:
        body = json.dumps({**ASK, "stream": stream}).encode()
        with worker.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: w\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            while number(worker, "vllm:generation_tokens_total") < 2:
                pass
            if stream:
                assert b"data: " in connection.recv(1 << 16)
        before = number(worker, "vllm:generation_tokens_total")
        while number(worker, "vllm:kv_cache_usage_perc"):
            pass
        assert number(worker, "vllm:generation_tokens_total") - before <= 2
        assert number(worker, "vllm:num_requests_running") == 0
        ended = 'vllm:request_success_total{model_name="sim",engine="0",finished_reason="abort"'
        page = urllib.request.urlopen(f"{worker.url}/metrics").read().decode()
        assert ended + "} 1\n" in page
