"""Prefill and decode workers as deploy/ renders them: both legs, the KV, and the end of a Pod."""

import subprocess
import sys

import pytest
import yaml

import worker.cli.flags
from fleet.command_lines import parser_of
from fleet.run.layout import DISAGGREGATED_CONFIG
from picker.framework.disaggregation import DECODE_ROLES, PREFILL_ROLES, ROLE_LABEL
from tests.support.kube.manifests import (
    ROOT,
    Object,
    container_of,
    file_of,
    kustomized,
    of_kind,
    pod_of,
    takes,
    workloads,
)
from worker.config import KvTransferConfig
from worker.kv.access import KEY_VARIABLE, read_key

pytestmark = pytest.mark.usefixtures("kubectl")
OVERLAY = "deploy/k8s/overlays/disaggregated"
ADDONS = "deploy/k8s/addons"
POD_IP = "10.1.2.3"
KV_PORT = 14579


def deployment(role: str) -> Object:
    [found] = [one for one in workloads(kustomized(OVERLAY)) if labels(one).get(ROLE_LABEL) == role]
    return found


def labels(workload: Object) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def container(role: str, name: str) -> Object:
    return container_of([deployment(role)], name)


def transfer(role: str) -> KvTransferConfig:
    words = [word.replace("$(POD_IP)", POD_IP) for word in container(role, "worker")["args"]]
    taken = worker.cli.flags.build_parser().parse_args(words)
    found = worker.cli.flags.resolve(taken, None, {}).engine.kv_transfer
    assert found is not None
    return found


def test_the_picker_decides_as_that_of_up_does() -> None:
    objects = kustomized(OVERLAY)
    assert yaml.safe_load(file_of(objects, "picker.yaml")) == yaml.safe_load(DISAGGREGATED_CONFIG)
    [pool] = of_kind(objects, "InferencePool")
    prefill, decode = labels(deployment("prefill")), labels(deployment("decode"))
    assert takes(pool["spec"]["selector"], prefill)
    assert takes(pool["spec"]["selector"], decode)
    assert prefill[ROLE_LABEL] in PREFILL_ROLES - DECODE_ROLES
    assert decode[ROLE_LABEL] in DECODE_ROLES - PREFILL_ROLES


def test_requests_pass_the_sidecar() -> None:
    sidecar = container("decode", "sidecar")
    taken = parser_of("sidecar").parse_args(sidecar["args"])
    [pool] = of_kind(kustomized(OVERLAY), "InferencePool")
    assert [taken.port] == [port["number"] for port in pool["spec"]["targetPorts"]]
    assert [taken.port] == [port["containerPort"] for port in sidecar["ports"]]
    assert taken.host == "0.0.0.0"
    behind = worker.cli.flags.build_parser().parse_args(container("decode", "worker")["args"])
    assert taken.decoder == f"http://{behind.host}:{behind.port}"
    assert sidecar["restartPolicy"] == "Always"
    # The worker starts once this has answered, so it may not be a question to the worker.
    assert set(sidecar["startupProbe"]) & {"httpGet", "tcpSocket", "grpc"} == {"tcpSocket"}


def test_the_image_has_what_the_sidecar_needs() -> None:
    sidecar = container("decode", "sidecar")
    assert sidecar["image"] == container("decode", "worker")["image"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in sidecar["env"]
    assert sidecar["command"] == ["pointsman", "sidecar"]
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'envoy', 'grpc', 'kubernetes', 'numpy')))\n"
        "import fleet.commands.cli, fleet.proxy.sidecar\n"
        "fleet.commands.cli.main(['sidecar', '--help'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "--prefiller-networks" in done.stdout, done.stderr


def test_an_end_leaves_time_for_both_legs() -> None:
    """Requests whose prompts run elsewhere come to the worker before it takes no more; all of them
    end before the kubelet's patience does, and the sidecar last.
    """
    decode, behind = pod_of(deployment("decode")), container("decode", "worker")
    sidecar = parser_of("sidecar").parse_args(container("decode", "sidecar")["args"])
    taken = worker.cli.flags.build_parser().parse_args(behind["args"])
    drain = worker.cli.flags.resolve(taken, None, {}).shutdown_timeout_seconds
    waits = {
        role: container(role, "worker")["lifecycle"]["preStop"]["sleep"]["seconds"]
        for role in ("prefill", "decode")
    }
    assert waits["decode"] >= waits["prefill"] + sidecar.prefill_timeout
    assert (
        waits["decode"] + drain + sidecar.drain_timeout <= decode["terminationGracePeriodSeconds"]
    )


def test_decode_workers_can_take_what_prefill_workers_offer() -> None:
    giver, taker = transfer("prefill"), transfer("decode")
    assert (giver.gives, giver.takes, giver.kv_ip, giver.kv_port) == (True, False, POD_IP, KV_PORT)
    assert (taker.gives, taker.takes, taker.kv_ip) == (False, True, "127.0.0.1")
    keys = [
        entry["valueFrom"]["secretKeyRef"]
        for role in ("prefill", "decode")
        for entry in container(role, "worker")["env"]
        if entry["name"] == KEY_VARIABLE
    ]
    assert keys == [{"name": "pointsman-kv-transfer", "key": "key"}] * 2
    assert read_key(giver, {KEY_VARIABLE: "k"}) == read_key(taker, {KEY_VARIABLE: "k"})


def _lets(policies: list[Object], way: str, of: Object, other: Object, port: int) -> bool:
    """True if policies let Pods with the labels `of` have traffic with `other`, of their namespace.
    No policy about them lets everything; a rule without ports or peers is about all of them.
    """
    about = [
        one["spec"]
        for one in policies
        if way.capitalize() in one["spec"]["policyTypes"] and takes(one["spec"]["podSelector"], of)
    ]
    rules = [rule for spec in about for rule in spec.get(way, ())]
    sides = {"ingress": "from", "egress": "to"}
    return not about or any(
        port in [one["port"] for one in rule.get("ports") or [{"port": port}]]
        and any(_is_meant(peer, other) for peer in rule.get(sides[way]) or [{"podSelector": {}}])
        for rule in rules
    )


def _is_meant(peer: Object, other: Object) -> bool:
    is_here = not peer.get("namespaceSelector") and "ipBlock" not in peer
    return is_here and takes(peer.get("podSelector", {}), other)


GATEWAY = {"gateway.networking.k8s.io/gateway-name": "pointsman"}
PICKER = {"app.kubernetes.io/name": "pointsman-picker"}
WORKER = {"app.kubernetes.io/name": "pointsman-worker"}
PREFILL, DECODE = ({**WORKER, ROLE_LABEL: role} for role in ("prefill", "decode"))
# Whether it may leave its source, and enter its target; no policy is about gateways.
TRAFFIC = [
    (DECODE, PREFILL, KV_PORT, (True, True)),
    (DECODE, PREFILL, 8000, (True, True)),
    (PICKER, PREFILL, 8000, (True, True)),
    (PICKER, DECODE, 8000, (True, True)),
    (GATEWAY, DECODE, 8000, (True, True)),
    (PREFILL, DECODE, 8000, (False, False)),
    (DECODE, DECODE, 8000, (False, False)),
    (WORKER, PREFILL, 8000, (False, False)),
    (GATEWAY, PREFILL, KV_PORT, (True, False)),
    *((one, PREFILL, KV_PORT, (False, False)) for one in (PICKER, WORKER, PREFILL)),
    (GATEWAY, DECODE, 8200, (True, False)),
    *((one, DECODE, 8200, (False, False)) for one in (PICKER, PREFILL, DECODE)),
]


def _ways(policies: list[Object], source: Object, target: Object, port: int) -> tuple[bool, bool]:
    leaves = _lets(policies, "egress", source, target, port)
    return leaves, _lets(policies, "ingress", target, source, port)


def _policies() -> list[Object]:
    names = ("network-policy", "network-policy-disaggregated")
    return [one for name in names for one in kustomized(f"{ADDONS}/{name}")]


@pytest.mark.parametrize(("source", "target", "port", "passes"), TRAFFIC)
def test_only_decode_workers_reach_kv(
    source: Object, target: Object, port: int, passes: tuple[bool, bool]
) -> None:
    assert _ways(_policies(), source, target, port) == passes


@pytest.mark.parametrize(
    ("way", "rule"),
    [("ingress", {}), ("ingress", {"ports": [{"port": KV_PORT}]}), ("egress", {"to": []})],
)
def test_a_rule_that_opens_too_much_would_be_seen(way: str, rule: Object) -> None:
    policies = _policies()
    for policy in policies:
        policy["spec"][way] = [*policy["spec"].get(way, ()), rule]
    wrong = [one for *ends, passes in TRAFFIC if (one := _ways(policies, *ends)) != passes]
    assert wrong
    assert all(one[way == "ingress"] for one in wrong)
