"""A real worker process, with the simulator behind it: start, fingerprint, serve, drain, die."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from worker.app import system_fingerprint
from worker.config import EngineConfig, SpeculativeConfig

CHAT = "/v1/chat/completions"
# Simulated answers may end at any token unless `ignore_eos` is set.
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
PATIENCE_SECONDS = 120.0


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str

    def engine_pid(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def spawn(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "worker", "--engine", "sim", "--port", "0"]
    # On a busy machine the engine may be slow; it must not count as lost.
    command += ["--heartbeat-timeout", "600", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def worker(*flags: str) -> Iterator[Running]:
    process = spawn(*flags)
    try:
        line = process.stdout.readline()
        ready = re.fullmatch(r"worker ready on (\S+) in \d+\.\d s\n", line)
        assert ready, line + (process.stderr.read() if process.stderr else "")
        yield Running(process, ready[1])
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def client_of(running: Running) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=PATIENCE_SECONDS)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_serves_and_drains() -> None:
    flags = ("--served-model-name", "m", "--enable-admin-routes", "--sim-decode-base-ms", "1000")
    with worker(*flags) as running, client_of(running) as client:
        engine = running.engine_pid()
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "m"
        whole = client.post(CHAT, json={**ASK, "max_tokens": 2}).json()
        assert whole["usage"]["completion_tokens"] == 2
        assert "vllm:num_requests_running" in client.get("/metrics").text
        with client.stream(
            "POST", CHAT, json={**ASK, "stream": True, "max_tokens": 60}
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            with client_of(running) as other:
                # The stream must not end before these checks.
                assert other.post("/pause", params={"mode": "keep"}).status_code == 200
                faster = {"decode-base": 10}
                assert other.post("/admin/config", json=faster).status_code == 200
                running.process.send_signal(signal.SIGTERM)
                while other.get("/health/ready").status_code == 200:
                    pass
                refused = other.post(CHAT, json=ASK)
                assert other.post("/resume").status_code == 200
            frames = [line for line in lines if line]
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert frames[-1] == "data: [DONE]"
        assert json.loads(frames[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(PATIENCE_SECONDS) == 0
        assert not is_running(engine)


def read_until_cut(response: httpx.Response, after_first: Callable[[], None]) -> bytes:
    """Return the bytes of a stream before its connection was cut; a regular end fails the test."""
    received = b""
    chunks = response.iter_raw()
    try:
        received = next(chunks)
        after_first()
        for chunk in chunks:
            received += chunk
    except httpx.RemoteProtocolError:
        return received
    pytest.fail(f"the stream had a regular end: {received[-300:]!r}")


def assert_ends_in_error(received: bytes) -> None:
    last = received.decode().rstrip().rsplit("\n\n", 1)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    assert b"[DONE]" not in received


ENDLESS = {**ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("hears", [True, False])
def test_a_drain_aborts_streams_at_its_timeout(hears: bool) -> None:
    """The stream ends regularly even if the engine does not receive the abort."""
    flags = ("--sim-decode-base-ms", "100", "--shutdown-timeout", "0.2")
    with (
        worker(*flags) as running,
        httpx.Client(timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", running.url + CHAT, json=ENDLESS) as response,
    ):

        def end() -> None:
            os.kill(running.engine_pid(), signal.SIGCONT if hears else signal.SIGSTOP)
            running.process.send_signal(signal.SIGTERM)

        received = read_until_cut(response, end)
        assert_ends_in_error(received)
        assert running.process.wait(PATIENCE_SECONDS) == 0


def test_the_engines_death_ends_streams_and_the_worker() -> None:
    with (
        worker("--sim-decode-base-ms", "50", "--engine-failure-policy", "exit") as running,
        httpx.Client(timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", running.url + CHAT, json=ENDLESS) as response,
    ):
        received = read_until_cut(response, lambda: os.kill(running.engine_pid(), signal.SIGKILL))
        assert_ends_in_error(received)
        assert running.process.wait(PATIENCE_SECONDS) == 1


def test_a_busy_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = spawn("--port", port)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (1, "")
    assert err == (
        f"pointsman worker: port {port} on 127.0.0.1 is already in use; choose another with"
        " --port\n"
    )


def test_a_bad_model_is_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    process = spawn("--model", str(bad))
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"pointsman worker: {bad}: ")
    assert err.count("\n") == 1


@pytest.mark.model
def test_the_simulator_can_use_a_real_tokenizer(model_path: Path) -> None:
    with worker("--model", str(model_path), "--sim-time-scale", "0") as running:
        body = httpx.post(running.url + CHAT, json=ASK, timeout=PATIENCE_SECONDS).json()
    assert body["model"] == "SmolLM2-135M-Instruct"
    assert body["usage"]["prompt_tokens"] == 31
    assert body["choices"][0]["message"]["content"]


def test_a_second_signal_ends_the_drain() -> None:
    with (
        worker("--sim-decode-base-ms", "500") as running,
        httpx.Client(timeout=PATIENCE_SECONDS) as client,
    ):

        def interrupt_twice() -> None:
            running.process.send_signal(signal.SIGINT)
            with client_of(running) as other:
                while other.get("/health/ready").status_code == 200:
                    pass
            running.process.send_signal(signal.SIGINT)

        with client.stream("POST", running.url + CHAT, json=ENDLESS) as response:
            assert_ends_in_error(read_until_cut(response, interrupt_twice))
        assert running.process.wait(PATIENCE_SECONDS) == 0


def test_a_signal_during_the_start_ends_it() -> None:
    process = spawn("--port", "0")
    pid = process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (started := children.read_text().split()):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert not is_running(int(started[0]))


def test_the_http_process_does_not_load_torch() -> None:
    code = "import sys, worker.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=worker", "-out", str(certificate)]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_a_worker_serves_https(certificate: tuple[Path, Path]) -> None:
    chain, key = (str(path) for path in certificate)
    flags = ("--ssl-certfile", chain, "--ssl-keyfile", key, "--sim-time-scale", "0")
    with worker(*flags) as running:
        assert running.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=chain)
        with httpx.Client(base_url=running.url, verify=trust, timeout=PATIENCE_SECONDS) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
            with client.stream("POST", CHAT, json={**ASK, "stream": True}) as response:
                assert list(response.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url.replace("https", "http") + "/health")


def test_clients_need_a_certificate_with_ssl_ca_certs(certificate: tuple[Path, Path]) -> None:
    chain, key = (str(path) for path in certificate)
    flags = ("--ssl-certfile", chain, "--ssl-keyfile", key, "--ssl-ca-certs", chain)
    with worker(*flags) as running:
        trust = ssl.create_default_context(cafile=chain)
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url + "/health", verify=trust)
        trust.load_cert_chain(chain, key)
        assert (
            httpx.get(running.url + "/health", verify=trust, timeout=PATIENCE_SECONDS).status_code
            == 200
        )


def test_a_worker_listens_on_a_unix_socket(short_path: Path) -> None:
    path = short_path / "worker.sock"
    with worker("--uds", str(path)) as running:
        assert running.url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(
            transport=transport, base_url="http://worker", timeout=PATIENCE_SECONDS
        ) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_SECONDS) == 0
    assert not path.exists()


def test_a_worker_warns_if_other_machines_can_reach_it_without_a_key() -> None:
    """Containers need this, so it is not an error."""
    process = spawn("--host", "0.0.0.0")
    assert "0.0.0.0" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "can be reached from other machines without a key" in err


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
SITE = "https://app.test"


def cors(response: httpx.Response) -> dict[str, str]:
    prefix = "access-control-"
    return {k[len(prefix) :]: v for k, v in response.headers.items() if k.startswith(prefix)}


@pytest.mark.parametrize(
    ("flags", "origin", "status", "granted"),
    [
        ((), SITE, 200, {"allow-origin": "*"}),
        (("--allowed-origins", f'["{SITE}"]'), SITE, 200, {"allow-origin": SITE}),
        (("--allowed-origins", f'["{SITE}"]'), "https://other.test", 400, {}),
        (
            ("--allow-credentials", "--allowed-methods", '["POST"]', "--allowed-headers", "[]"),
            SITE,
            400,
            {"allow-origin": SITE, "allow-credentials": "true"},
        ),
        (("--allowed-origins", "[]"), SITE, 200, {}),
    ],
)
def test_pages_of_allowed_origins_may_send_requests(
    flags: tuple[str, ...], origin: str, status: int, granted: dict[str, str]
) -> None:
    """A preflight needs no API key. Errors have the headers too, so that pages can read them."""
    with worker("--api-key", "k", *flags) as running, client_of(running) as client:
        preflight = client.options(CHAT, headers={"origin": origin, **PREFLIGHT})
        assert preflight.status_code == status
        allowed = cors(preflight)
        assert {name: allowed.get(name) for name in granted} == granted
        if status == 200 and granted:
            assert "POST" in allowed["allow-methods"]
            assert allowed["allow-headers"] == PREFLIGHT["access-control-request-headers"]
        refused = client.post(CHAT, json=ASK, headers={"origin": origin})
        assert refused.status_code == 401
        assert cors(refused).get("allow-origin") == granted.get("allow-origin")
        assert cors(client.get("/health")) == {}


def test_a_chat_template_flag_replaces_the_models_own() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with worker("--chat-template", template) as running, client_of(running) as client:
        rendered = client.post("/tokenize", json={"messages": ASK["messages"]}).json()
        plain = client.post("/tokenize", json={"prompt": "hello"}).json()
    assert rendered["tokens"] == plain["tokens"]


CONFIG = EngineConfig(engine="torch", model_path="/models/tiny")


def test_a_fingerprint_names_version_and_configuration() -> None:
    first = system_fingerprint(CONFIG)
    assert re.fullmatch(r"pointsman-[^-]+-[0-9a-f]{8}", first)
    assert system_fingerprint(replace(CONFIG)) == first
    assert system_fingerprint(replace(CONFIG, dtype="bfloat16")) != first


def test_the_fingerprint_omits_secrets_and_the_machine() -> None:
    other = replace(CONFIG, prefix_caching_hash_seed="secret", num_threads=7)
    assert system_fingerprint(other) == system_fingerprint(CONFIG)


def test_the_fingerprint_includes_speculation_only_if_it_changes_answers() -> None:
    """Coupled drafts change no token; drafts drawn at random change the draws."""
    coupled = replace(CONFIG, speculative=SpeculativeConfig("ngram", 4))
    assert system_fingerprint(coupled) == system_fingerprint(CONFIG)
    drawn = SpeculativeConfig("eagle", 4, draft_sample_method="probabilistic")
    assert system_fingerprint(replace(CONFIG, speculative=drawn)) != system_fingerprint(CONFIG)
