"""Facts gathered over real sockets: pages of pickers, workers and Envoys, and of other programs."""

import asyncio
import contextlib
import json
import re
import resource
import ssl
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from fleet.command_lines import parser_of
from fleet.doctor.command import (
    CHECKS,
    FINE,
    WARNED,
    WRONG,
    as_json,
    diagnose,
    doctor_command,
    text_lines,
)
from fleet.doctor.diagnosis import Diagnosis, Facts
from fleet.doctor.envoy_look import ask_envoy
from fleet.doctor.picker_look import ask_certificate, ask_picker, ask_worker, ask_workers
from picker.config.findings import Severity
from picker.rpc.self_signed import self_signed
from tests.support.fleet.spoilt_bootstraps import bootstrap
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.pools_scene import SeveralPools, several_pools
from tests.support.web_server import for_all_paths, serving

Pages = dict[str, tuple[int, str, str]]
METRICS = """# TYPE llm_d_epp_ready_endpoints gauge
llm_d_epp_ready_endpoints{name="default"} 1
# TYPE pointsman_peer_calls_total counter
pointsman_peer_calls_total{result="self"} 1
pointsman_peer_calls_total{result="unreachable"} 2
"""
VLLM = """vllm:num_requests_waiting{engine="0"} 0
vllm:num_requests_running{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:cache_config_info{engine="0"} 1
"""
JSON, TEXT, HTML = "application/json", "text/plain", "text/html"
CONFIG = {"source": "it", "written": "", "effective": "", "loaded_unix_seconds": 0}


@contextlib.asynccontextmanager
async def site(
    pages: Pages, socket: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Run a server with these pages (status, kind, text) and 404 for others; yields its address."""

    async def answer(request: web.Request) -> web.Response:
        status, kind, text = pages.get(request.path, (404, TEXT, "404"))
        return web.Response(status=status, text=text, content_type=kind)

    app = for_all_paths(answer)
    if socket is None:
        async with serving(app, tls) as port:
            yield f"127.0.0.1:{port}"
        return
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    yield f"unix://{socket}"
    await runner.cleanup()


def picker_pages(worker: str) -> Pages:
    endpoint = {
        "key": "default/one",
        "name": "one",
        "namespace": "default",
        "address": worker,
        "labels": {},
        "health": {"state": "healthy"},
        "inflight_requests": 0,
    }
    return {
        "/readyz": (200, TEXT, "ready\n"),
        "/endpoints": (200, JSON, json.dumps({"endpoints": [endpoint]})),
        "/queues": (200, JSON, "{}"),
        "/config": (200, JSON, json.dumps(CONFIG)),
        "/metrics": (200, TEXT, METRICS),
    }


def worker_pages(**changes: tuple[int, str, str]) -> Pages:
    pages = {
        "health": (200, JSON, "{}"),
        "metrics": (200, TEXT, VLLM),
        "v1/models": (200, JSON, json.dumps({"data": [{"id": "m"}]})),
        "version": (200, JSON, json.dumps({"version": "1.2"})),
        **changes,
    }
    return {f"/{name}": page for name, page in pages.items()}


async def test_a_picker_and_its_worker_are_read() -> None:
    html = (200, HTML, "<html>")
    async with site(worker_pages(metrics=html)) as worker, site(picker_pages(worker)) as url:
        picker = await ask_picker(f"http://{url}")
        workers = await ask_workers(picker)
    assert picker.problem is None
    assert picker.metrics["llm_d_epp_ready_endpoints"] == 1
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert picker.files[1] == soft  # the site is of this process
    assert picker.words == tuple(sys.orig_argv)
    assert picker.peer_calls == {"self": 1.0, "unreachable": 2.0}
    found = diagnose(Facts(picker=picker, workers=workers))
    assert [one.check for one in found] == ["picker-scrapes", "worker-metrics"]
    assert "text/html" in found[1].seen


async def test_a_healthy_worker_is_read() -> None:
    async with site(worker_pages()) as address:
        facts = await ask_worker(address, ("vllm:num_requests_running",))
    assert (facts.models, facts.version) == (("m",), "1.2")
    assert "vllm:num_requests_waiting" in (facts.metrics_names or ())
    assert diagnose(Facts(workers=(facts,))) == ()


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/readyz": (200, HTML, "<html>")},
        {**picker_pages("a:1"), "/endpoints": (200, JSON, "[]")},
    ],
)
async def test_another_server_is_one_finding(pages: Pages) -> None:
    async with site(pages) as url:
        facts = await ask_picker(url)
    assert [one.check for one in diagnose(Facts(picker=facts))] == ["picker-reachable"]


async def test_a_wrong_clock_is_found() -> None:
    """The clock is compared with the date of the answer."""
    later = datetime.now(UTC) + timedelta(hours=1)
    async with site(picker_pages("a:1")) as url:
        facts = await ask_picker(url, lambda: later)
    assert facts.ahead_seconds == pytest.approx(-3600, abs=60)


async def test_a_missing_server_is_no_crash() -> None:
    gone = "127.0.0.1:1"
    facts = Facts(
        picker=await ask_picker(gone),
        envoys=(await ask_envoy(gone),),
        workers=(await ask_worker(gone),),
        certificates=(await ask_certificate(gone),),
    )
    assert [one.check for one in diagnose(facts)] == [
        "picker-reachable",
        "tls-expiry",
        "worker-reachable",
        "envoy-reachable",
    ]


async def test_a_running_envoy_is_read(tmp_path: Path) -> None:
    address = {"socket_address": {"address": "1.1.1.1", "port_value": 1}}
    ill = {"eds_health_status": "HEALTHY", "failed_outlier_check": True}
    pages = {
        "/config_dump": (200, JSON, json.dumps({"configs": [{"bootstrap": bootstrap()}]})),
        "/server_info": (200, JSON, json.dumps({"version": "abc/1.36.9/Clean/RELEASE/BoringSSL"})),
        "/clusters": (
            200,
            JSON,
            json.dumps(
                {
                    "cluster_statuses": [
                        {"name": name, "host_statuses": [{"address": address, **health}]}
                        for name, health in (("pool", {}), ("picker", {"health_status": ill}))
                    ]
                }
            ),
        ),
    }
    async with site(pages, tmp_path / "admin") as url:
        found = diagnose(Facts(envoys=(await ask_envoy(url),)))
    assert [one.check for one in found] == ["envoy-version", "envoy-hosts"]
    assert "1.1.1.1:1: failed_outlier_check" in found[1].seen


def self_signed_context(tmp_path: Path) -> ssl.SSLContext:
    material, pair = self_signed(), tmp_path / "pair.pem"
    pair.write_bytes(material.private_key + material.certificate_chain)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair)
    return context


async def test_a_picker_is_read_over_tls_whatever_its_certificate(tmp_path: Path) -> None:
    """The check `tls-expiry` judges the certificate."""
    async with site(picker_pages("a:1"), tls=self_signed_context(tmp_path)) as address:
        assert (await ask_picker(f"https://{address}")).problem is None


async def test_the_remaining_days_of_a_certificate_are_counted(tmp_path: Path) -> None:
    context = self_signed_context(tmp_path)
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        now = await ask_certificate(address)
        later = await ask_certificate(
            f"https://{address}", lambda: datetime.now(UTC) + timedelta(days=50_000)
        )
    assert now.days_left > 0
    assert later.days_left < 0


def run(*argv: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    lines: list[str] = []
    status = doctor_command(parser_of("doctor").parse_args(argv), environment or {}, lines.append)
    return status, "\n".join(lines)


def test_the_command_over_files(tmp_path: Path) -> None:
    spoilt = bootstrap()
    clusters = spoilt["static_resources"]["clusters"]
    del next(one for one in clusters if one["name"] == "picker")["health_checks"]
    well, doubtful, wrong = (tmp_path / name for name in ("well", "doubtful", "wrong"))
    well.write_text(json.dumps(bootstrap()))
    doubtful.write_text(json.dumps(spoilt))
    wrong.write_text("[]")
    config = "--envoy-config"
    assert run(config, str(well))[0] == FINE
    status, text = run(config, str(doubtful))
    assert status == WARNED
    assert "envoy-picker-health-check" in text
    assert "grpc_health_check" in text
    assert run(config, str(doubtful), config, str(wrong))[0] == WRONG
    assert run(config, str(doubtful), "--only", "envoy-version")[0] == FINE
    status, text = run(config, str(doubtful), "--json")
    assert json.loads(text)["findings"][0]["severity"] == "warning"


def test_an_unreachable_cluster_is_reported(tmp_path: Path) -> None:
    status, text = run("--pool", "it", "--kubeconfig", str(tmp_path / "none"))
    assert status == WRONG
    assert "k8s-reachable" in text
    with pytest.raises(SystemExit, match="2"):
        run("--kubeconfig", "x")


def test_the_flag_list_names_all_checks() -> None:
    _, text = run("--list")
    assert all(one.name in text and one.about in text for one in CHECKS)


@pytest.mark.parametrize("severity", [Severity.ERROR, Severity.WARNING])
def test_control_codes_in_a_finding_do_not_reach_the_terminal(severity: Severity) -> None:
    found = (Diagnosis(severity, "a\x1b[2J\nb", "why", "fix"),)
    text = "\n".join(text_lines(found, ["it"], 80))
    assert "\x1b" not in text
    assert "\x1b" not in as_json(found, ["it"])
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[SeveralPools]:
    known = pods(page(), page())
    pools = {"llama": known, "a/qwen": known[:1], "b/qwen": ()}
    async with several_pools(tmp_path, pools) as made:
        yield made


async def test_each_pool_has_findings_of_its_own(scene: SeveralPools) -> None:
    root = f"http://127.0.0.1:{scene.ports.metrics}"
    for key, endpoints, checks in (
        ("llama", 2, set()),
        ("a/qwen", 1, set()),
        ("b/qwen", 0, {"picker-endpoints"}),
    ):
        facts = await ask_picker(f"{root}/pools/{key}/")
        assert facts.problem is None
        assert len(facts.endpoints) == endpoints
        assert facts.config is not None
        assert facts.metrics["llm_d_epp_ready_endpoints"] == endpoints
        assert facts.files is not None
        found = {one.check for one in diagnose(Facts(picker=facts))}
        assert found == checks


async def test_the_address_of_all_and_of_none(scene: SeveralPools) -> None:
    root = f"http://127.0.0.1:{scene.ports.metrics}"
    for url in (root, f"{root}/pools", f"{root}/pools/other"):
        (found,) = diagnose(Facts(picker=await ask_picker(url)))
        assert found.check == "picker-reachable"
        assert url in found.seen


PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_every_check_is_in_the_list() -> None:
    items = re.findall(
        r"^- `([a-z0-9]+-[a-z0-9-]+)`: (.+(?:\n  .+)*)", PAGE.read_text(), re.MULTILINE
    )
    assert [name for name, _ in items] == [one.name for one in CHECKS]
    for (name, text), check in zip(items, CHECKS, strict=True):
        about, *_ = re.split(r"; | \(w", " ".join(text.split()))
        assert about == check.about, name
