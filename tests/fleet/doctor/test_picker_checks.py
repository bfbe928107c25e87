"""Findings from the answers of a picker and its workers."""

import dataclasses

import pytest
from msgspec.structs import replace

from fleet.doctor.command import diagnose
from fleet.doctor.diagnosis import Facts
from fleet.doctor.picker_look import CertificateFacts, PickerFacts, WorkerFacts, expected_names
from picker.admin.views import HEALTHY, ConfigView, EndpointView, HealthView
from picker.config.findings import Severity
from picker.flowcontrol.views import QueuesView
from picker.types import EndpointMetrics

CONFIG = ConfigView("picker.yaml", "", "", 0.0)
VLLM = frozenset(expected_names({}))


def endpoint(age: float | None = 0.1, **changes: object) -> EndpointView:
    known = None if age is None else EndpointMetrics()
    given = {"health": HEALTHY, "metrics": known, "metrics_age_seconds": age, **changes}
    return EndpointView(
        key="default/one",
        name="one",
        namespace="default",
        address="10.0.0.1:8000",
        labels={},
        inflight_requests=0,
        **given,
    )


WELL = PickerFacts(
    "http://it",
    readiness="ready",
    endpoints=(endpoint(),),
    config=CONFIG,
    metrics={"llm_d_epp_ready_endpoints": 1.0},
    ahead_seconds=-0.6,
    files=(9, 65536),
)
WORKER = WorkerFacts("1.1.1.1:1", metrics_names=VLLM, expected=tuple(VLLM), models=("it",))


def test_a_healthy_picker_and_worker_have_no_findings() -> None:
    certificate = CertificateFacts("it:443", days_left=60.0)
    facts = Facts(picker=WELL, workers=(WORKER,), certificates=(certificate,))
    assert diagnose(facts) == ()
    assert diagnose(Facts()) == ()


def ill(check: str, severity: str, text: str, **changes: object) -> object:
    return pytest.param(changes, check, Severity(severity), text, id=f"{check} {text}")


LEADERLESS = "not ready\non standby; the leader is unknown"
LACKING = {"llm_d_epp_datalayer_extract_errors_total": 3.0}
EJECTED = endpoint(health=HealthView("ejected", 3))
FULL = QueuesView(is_on=True, saturation=1.2, queued_requests=7)
SGLANG = frozenset({"sglang:num_running_reqs"})
OF_PICKERS = (
    ill("picker-reachable", "error", "refused", problem="refused"),
    ill("picker-ready", "error", "no file", is_ready=False, readiness="not ready\nno file"),
    ill("picker-ready", "error", "the leader is unknown", is_ready=False, readiness=LEADERLESS),
    ill("picker-ready", "warning", "old since noon", readiness="ready\nold since noon"),
    ill("picker-endpoints", "error", "none", endpoints=()),
    ill("picker-scrapes", "error", "never read", endpoints=(endpoint(None),)),
    ill("picker-scrapes", "warning", "90.0 s old", endpoints=(endpoint(), endpoint(90.0))),
    ill("picker-scrapes", "warning", "3 metrics pages", metrics={**WELL.metrics, **LACKING}),
    ill("picker-health", "warning", "ejected after 3 failures", endpoints=(EJECTED,)),
    ill("picker-queues", "warning", "7 requests wait", queues=FULL),
    ill("picker-gauges", "warning", "llm_d_epp_ready_endpoints", metrics={}),
    ill("picker-config", "error", "line 3: no", config=replace(CONFIG, last_error="line 3: no")),
    ill("picker-config", "warning", "doubtful", config=replace(CONFIG, warnings=("doubtful",))),
    ill("picker-files", "warning", "256 files", files=(9, 256)),
    ill("picker-files", "error", "60000 of 65536", files=(60000, 65536)),
    ill("picker-clock", "warning", "61 s ahead of", ahead_seconds=61.0),
    ill("picker-clock", "warning", "9 s behind", ahead_seconds=-9.0),
)
OF_WORKERS = (
    ill("worker-reachable", "error", "refused", problem="refused"),
    ill("worker-health", "error", "503", health_status=503),
    ill("worker-metrics", "error", "text/html", metrics_names=None, metrics_kind="text/html"),
    ill("worker-metrics", "error", "these are of sglang", metrics_names=SGLANG),
    ill("worker-metrics", "error", "has none of", metrics_names=frozenset({"up"})),
    ill("worker-models", "error", "lists no model", models=()),
    ill("worker-models", "error", "no list", models=None),
)


@pytest.mark.parametrize(("changes", "check", "severity", "text"), [*OF_PICKERS, *OF_WORKERS])
def test_a_fault_is_found_by_its_check(
    changes: dict[str, object], check: str, severity: Severity, text: str
) -> None:
    if check.startswith("picker"):
        facts = Facts(picker=dataclasses.replace(WELL, **changes))
    else:
        facts = Facts(workers=(dataclasses.replace(WORKER, **changes),))
    (finding,) = diagnose(facts)
    assert (finding.check, finding.severity) == (check, severity)
    assert text in finding.seen


def test_a_follower_has_no_findings() -> None:
    """It is not ready on purpose while another one leads."""
    text = "not ready\non standby; the leader is picker-1_9f"
    standby = dataclasses.replace(WELL, is_ready=False, readiness=text, endpoints=())
    assert diagnose(Facts(picker=standby)) == ()


@pytest.mark.parametrize(
    ("connected", "known", "peers", "calls", "others"),
    [
        (0, 0, "", {}, None),
        (2, 2, "", {}, None),
        (2, 1, "", {}, 2),
        (1, 2, "", {}, 2),
        (1, 1, "a:1,b:1,c:1", {"self": 1.0}, 2),
        (2, 2, "a:1,b:1,c:1", {"self": 1.0, "unreachable": 9.0}, None),
        (2, 2, "a:1, b:1,b:1", {}, None),
        (0, 0, "a:1", {"unreachable": 9.0}, 1),
        (1, 1, "a:1,b:1", {"known": 3.0}, None),
    ],
)
def test_missing_replicas_are_found(
    connected: float, known: float, peers: str, calls: dict[str, float], others: int | None
) -> None:
    """Fewer are connected than are named; a picker may name itself, or one replica twice."""
    series = {"pointsman_peers_connected": float(connected), "pointsman_peers_heard": float(known)}
    words = ("pointsman", "picker", "--peers", peers) if peers else ()
    picker = dataclasses.replace(
        WELL, metrics={**WELL.metrics, **series}, words=words, peer_calls=calls
    )
    found = diagnose(Facts(picker=picker))
    assert [one.check for one in found] == ([] if others is None else ["picker-peers"])
    assert all(f"of {others} other replicas it receives from {known}" in one.seen for one in found)


def test_experimental_plugins_are_found() -> None:
    config = replace(CONFIG, experimental=("near",))
    (found,) = diagnose(Facts(picker=dataclasses.replace(WELL, config=config)))
    assert found.check == "picker-experimental"
    assert found.seen == "picker.yaml: plugin 'near' is experimental"


def test_workers_of_several_versions_are_found() -> None:
    two = [dataclasses.replace(WORKER, version=one) for one in ("0.1", "0.2")]
    (finding,) = diagnose(Facts(workers=tuple(two)))
    assert finding.check == "worker-versions"
    assert diagnose(Facts(workers=(two[0], two[0]))) == ()


def test_certificates_that_end_are_found_in_time() -> None:
    for certificate, severity in (
        (CertificateFacts("it:1", days_left=3.0), Severity.WARNING),
        (CertificateFacts("it:1", days_left=-3.0), Severity.ERROR),
        (CertificateFacts("it:1", problem="no TLS there"), Severity.ERROR),
    ):
        (finding,) = diagnose(Facts(certificates=(certificate,)))
        assert (finding.check, finding.severity) == ("tls-expiry", severity)
