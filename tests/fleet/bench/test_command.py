"""The whole command, over real sockets to a real worker with the simulator's engine."""

import csv
import io
import json
import os
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from fleet.bench import command
from fleet.bench.command import bench_command
from fleet.bench.shard import endpoint_of
from fleet.errors import FleetError
from tests.support.certificates import Authority
from tests.support.worker.sim_worker import sim_worker

QUICK = ("--requests", "12", "--rate", "200", "--input-tokens", "40", "--output-tokens", "5")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sim_worker() as worker:
        yield worker.url


def bench(*argv: str) -> tuple[int, str]:
    said: list[str] = []
    status = bench_command(argv, said.append, Console(stderr=True, force_terminal=False))
    return status, "\n".join(said)


def test_every_request_is_in_every_result(url: str, tmp_path: Path) -> None:
    files = [tmp_path / "new" / name for name in ("a.json", "a.csv", "a.html")]
    names = [word for path in files for word in (f"--{path.suffix[1:]}", str(path))]
    secret = ("--header", "authorization: Bearer s3cret")
    status, text = bench("--url", url, *QUICK, "--rate", "200,300", *secret, *names)
    assert status == 0
    document = json.loads(files[0].read_text())
    assert [one["requests"] for one in document["stages"]] == [12, 12]
    assert [one["output_tokens"] for one in document["stages"]] == [60, 60]
    assert document["settings"]["rate"] == ["200", "300"]
    assert document["run"]["command"].startswith("pointsman bench --url ")
    rows = list(csv.DictReader(files[1].open()))
    assert [row["stage"] for row in rows] == ["200/s"] * 12 + ["300/s"] * 12
    assert {row["output_tokens"] for row in rows} == {"5"}
    # The tokens of a word were measured at the endpoint: 40, and those of the chat's template.
    assert all(40 <= int(row["prompt_tokens"]) < 80 for row in rows)
    assert "12 requests" in text
    assert "s3cret" not in "".join(path.read_text() for path in files) + text


def test_the_page_needs_nothing_else(url: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    bench("--url", url, *QUICK, "--slo", "ttft<9s,e2e_p95<9s", "--html", str(path))
    tags: list[tuple[str, dict[str, str | None]]] = []

    class Seen(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attrs)))

    Seen().feed(path.read_text())
    names = [tag for tag, _ in tags]
    assert not {"link", "img", "iframe"} & set(names)
    assert not [one for _, attrs in tags for one in attrs if one in ("src", "href")]
    text = path.read_text()
    assert not re.search(r"url\(|^import |\bfetch\(", text, re.MULTILINE)
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    plots = json.loads(data)
    assert [(one["title"], len(one["series"][0])) for one in plots[3:4]] == [
        ("First token over time", 12)
    ]
    assert len(plots) == 5
    marks = [mark["label"] for one in plots for mark in one.get("marks", ())]
    assert [one for one in marks if one.startswith("SLO")] == ["SLO 9 s", "SLO p95 9 s", "SLO 9 s"]
    words = re.sub(r"<[^>]+>", " ", text)
    assert "&#x27;ttft&lt;9s,e2e_p95&lt;9s&#x27;" in words
    assert version("pointsman") in words
    assert re.search(r"\b20\d\d-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", words)
    assert re.search(r"Model\s+sim\b", words)


@pytest.mark.parametrize(
    ("bounds", "status"), [("ttft<100s,e2e_p99<100s", 0), ("ttft<1us", 1), ("e2e_p50<1us", 1)]
)
def test_the_exit_status_is_that_of_the_objectives(url: str, bounds: str, status: int) -> None:
    found, text = bench("--url", url, *QUICK, "--slo", bounds)
    assert (found, "missed" in text) == (status, status == 1)


def test_two_endpoints_take_turns_with_the_same_arrivals(url: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    argv = ("--compare-url", url, "--rounds", "2", "--csv", str(path), "--processes", "2")
    status, text = bench("--url", url, *QUICK, *argv, "--input-tokens", "20..60")
    assert status == 0
    assert "95 % interval" in text
    rows = list(csv.DictReader(path.open()))
    turns = {name: [r for r in rows if r["stage"] == name] for name in ("A1", "B1", "B2", "A2")}
    assert list(dict.fromkeys(row["stage"] for row in rows)) == list(turns)
    at = {name: [one["at_seconds"] for one in some] for name, some in turns.items()}
    lengths = {name: [one["prompt_tokens"] for one in some] for name, some in turns.items()}
    assert len({tuple(at[name]) for name in ("A1", "B1")}) == 1
    assert at["A1"] != at["A2"]
    assert len(set(lengths["A1"])) > 1


def test_an_endpoint_that_refuses_all_prompts_is_no_comparison(url: str) -> None:
    with sim_worker("--max-model-len", "400") as other:
        argv = ("--compare-url", other.url, "--rounds", "1", "--input-tokens", "500")
        status, text = bench("--url", url, *QUICK, *argv)
    assert status == 1
    assert "nothing to compare" in text


def test_shared_prefixes_and_sessions_are_found_cached(url: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    shares = []
    prefixes = ("--prefix-groups", "1", "--prefix-tokens", "400")
    for flags in ((), prefixes, ("--turns", "4")):
        one_by_one = (*QUICK[:2], "--concurrency", "1", *QUICK[4:])
        bench("--url", url, *one_by_one, *flags, "--json", str(path))
        (stage,) = json.loads(path.read_text())["stages"]
        shares.append(stage["cached_tokens"] / stage["prompt_tokens"])
    assert shares[0] < 0.4
    assert shares[1] > 0.6
    assert shares[2] > shares[0]


def test_a_trace_is_sent_at_its_own_times(url: str, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 3, "hash_ids": [1, n + 2]}
        for n in range(5)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "a.csv"
    status, _ = bench("--url", url, "--trace", str(trace), "--speed", "10", "--csv", str(path))
    rows = list(csv.DictReader(path.open()))
    assert status == 0
    assert [float(row["at_seconds"]) for row in rows] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert [row["output_tokens"] for row in rows] == ["3"] * 5


def test_ctrl_c_reports_what_was_answered_and_what_was_not(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is pressed when all clients have sent and some have an answer."""
    monkeypatch.setattr("fleet.bench.shard.STOP_SECONDS", 60.0)
    shown = re.compile(r" 5 in flight; of the last 10 s:\s.*: [1-9][0-9,]* requests in")

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if shown.search(text) and not shown.search(self.getvalue()):
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    screen, said = Screen(), []
    load = ("--concurrency", "5", "--duration", "240", "--processes", "2")
    argv = ("--url", url, *QUICK[4:], *load)
    status = bench_command(argv, said.append, Console(file=screen, force_terminal=True))
    assert status == 130
    assert "TTFT" in screen.getvalue()
    assert re.search(r"[1-9][0-9]* requests in", said[0])
    assert said[0].endswith("interrupted; requests in flight, not counted: 5")


def test_stages_that_ended_are_reported_whatever_comes_after(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = iter([command.follow, killed])
    monkeypatch.setattr(command, "follow", lambda processes: next(stages)(processes))
    path = tmp_path / "run.json"
    with pytest.raises(FleetError, match="killed"):
        bench("--url", url, *QUICK[:2], "--rate", "200,200", *QUICK[4:], "--json", str(path))
    [stage] = json.loads(path.read_text())["stages"]
    assert stage["requests"] == 12


async def killed(processes: object) -> None:
    raise FleetError("a process of the bench was killed")


def test_more_processes_than_sessions_are_refused() -> None:
    with pytest.raises(FleetError, match="--processes must not be more than --concurrency"):
        bench("--concurrency", "8,2", "--processes", "3")


def test_an_endpoint_that_fails_at_once_is_one_sentence(url: str) -> None:
    with pytest.raises(FleetError, match="fails a first request: status 404"):
        bench("--url", url, "--model", "another")


def test_a_missing_endpoint_is_one_sentence() -> None:
    with socket.socket() as taken:  # bound and not listening: no other server can answer there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FleetError) as caught:
            bench("--url", f"http://{address}")
    assert "\n" not in str(caught.value)
    assert address in str(caught.value)


def test_an_untrusted_certificate_is_reported_as_such(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("worker", address="127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    def greet(listener: socket.socket) -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            context.wrap_socket(connection, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(greet, listener)
        with pytest.raises(FleetError, match=r"no certificate that is trusted.*SSL_CERT_FILE"):
            bench("--url", f"https://127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.parametrize(
    ("url", "line", "port"),
    [
        ("http://a:81/v1", b"POST /v1/chat/completions HTTP/1.1\r\nhost: a:81\r\n", 81),
        ("https://u:p@a/x/", b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: a\r\n", 443),
        ("http://[::1]", b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\n", 80),
    ],
)
def test_addresses_are_those_of_other_clients(url: str, line: bytes, port: int) -> None:
    one = endpoint_of(url, True, [("x-a", "b")])
    assert one.head.startswith(line)
    assert one.head.endswith(b"\r\nx-a: b\r\n")
    assert (one.port, one.is_tls) == (port, url.startswith("https"))
