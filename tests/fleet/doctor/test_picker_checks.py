"""Findings from the answers of a picker and its workers."""

import dataclasses

import pytest

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


@pytest.mark.parametrize(
    ("changes", "check", "severity", "text"),
    [
        ({"problem": "refused"}, "picker-reachable", "error", "refused"),
        (
            {"is_ready": False, "readiness": "not ready\nno file"},
            "picker-ready",
            "error",
            "no file",
        ),
        (
            {"is_ready": False, "readiness": "not ready\non standby; the leader is unknown"},
            "picker-ready",
            "error",
            "the leader is unknown",
        ),
        ({"readiness": "ready\nold since noon"}, "picker-ready", "warning", "old since noon"),
        ({"endpoints": ()}, "picker-endpoints", "error", "none"),
        ({"endpoints": (endpoint(None),)}, "picker-scrapes", "error", "never read"),
        ({"endpoints": (endpoint(), endpoint(90.0))}, "picker-scrapes", "warning", "90.0 s old"),
        (
            {"metrics": {**WELL.metrics, "llm_d_epp_datalayer_extract_errors_total": 3.0}},
            "picker-scrapes",
            "warning",
            "3 metrics pages",
        ),
        (
            {"endpoints": (endpoint(health=HealthView("ejected", 3)),)},
            "picker-health",
            "warning",
            "ejected after 3 failures",
        ),
        (
            {"queues": QueuesView(is_on=True, saturation=1.2, queued_requests=7)},
            "picker-queues",
            "warning",
            "7 requests wait",
        ),
        ({"metrics": {}}, "picker-gauges", "warning", "llm_d_epp_ready_endpoints"),
        (
            {"config": ConfigView("p.yaml", "", "", 0.0, last_error="line 3: no")},
            "picker-config",
            "error",
            "line 3: no",
        ),
        (
            {"config": ConfigView("p.yaml", "", "", 0.0, warnings=("doubtful",))},
            "picker-config",
            "warning",
            "doubtful",
        ),
        ({"files": (9, 256)}, "picker-files", "warning", "256 files"),
        ({"files": (60000, 65536)}, "picker-files", "error", "60000 of 65536"),
        ({"ahead_seconds": 61.0}, "picker-clock", "warning", "61 s ahead of"),
        ({"ahead_seconds": -9.0}, "picker-clock", "warning", "9 s behind"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_faults_of_a_picker_are_found(
    changes: dict[str, object], check: str, severity: str, text: str
) -> None:
    (finding,) = diagnose(Facts(picker=dataclasses.replace(WELL, **changes)))
    assert (finding.check, finding.severity) == (check, Severity(severity))
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
    config = ConfigView("picker.yaml", "", "", 0.0, experimental=("near",))
    (found,) = diagnose(Facts(picker=dataclasses.replace(WELL, config=config)))
    assert found.check == "picker-experimental"
    assert found.seen == "picker.yaml: plugin 'near' is experimental"


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"problem": "refused"}, "worker-reachable", "refused"),
        ({"health_status": 503}, "worker-health", "503"),
        ({"metrics_names": None, "metrics_kind": "text/html"}, "worker-metrics", "text/html"),
        (
            {"metrics_names": frozenset({"sglang:num_running_reqs"})},
            "worker-metrics",
            "these are of sglang",
        ),
        ({"metrics_names": frozenset({"up"})}, "worker-metrics", "has none of"),
        ({"models": ()}, "worker-models", "lists no model"),
        ({"models": None}, "worker-models", "no list"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_faults_of_a_worker_are_found(changes: dict[str, object], check: str, text: str) -> None:
    (finding,) = diagnose(Facts(workers=(dataclasses.replace(WORKER, **changes),)))
    assert (finding.check, finding.severity) == (check, Severity.ERROR)
    assert text in finding.seen


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
