"""What processes say to each other arrives as it was said."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from picker.cli.options import LogFlags, MetricsTls, Options, TlsFlags
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.request_rules import Objective, RuleSet
from picker.pool.rewrites import RewriteRule, RewriteTarget
from picker.processes.messages import (
    Answered,
    Ask,
    Channel,
    Commit,
    Configuration,
    Drain,
    Failed,
    Follow,
    Message,
    Prepare,
    Prepared,
    Ready,
    Start,
    Subject,
    Tell,
    Told,
)
from picker.rpc.options import TlsMaterial, Transport
from picker.sharing.totals import numbers_of

OPTIONS = Options(
    config_file=Path("c.yaml"),
    endpoints_file=Path("/e.yaml"),
    tls=TlsFlags(Path("certs"), True, "VersionTLS13", ("SUITE",)),
    metrics_tls=MetricsTls(Path("m")),
    grpc_transport=Transport.H2,
    processes=3,
    logs=LogFlags(4, as_json=True),
)
RULES = RuleSet(
    (Objective("a", -1, "n"), Objective("b")),
    (RewriteRule("r", (RewriteTarget("m", 3), RewriteTarget("n")), frozenset("xy"), 1.5, 2),),
)
WRITTEN = Configuration(b"kind: \xff", "c.yaml", 7)


def told() -> Told:
    metrics = PickerMetrics()
    metrics.scheduler_e2e_duration_seconds.observe(0.5)
    metrics.request_total.labels("m", "m", "", "0").inc()
    return Told(None, numbers_of(metrics))


@pytest.mark.parametrize(
    "message",
    [
        Start(1, OPTIONS, WRITTEN, 3, [4, 5], 6, TlsMaterial(b"key", b"chain"), RULES),
        *(Prepare(1, WRITTEN), Commit(), Follow(RULES), Tell(2), Drain(), Ready(1), Failed("why")),
        *(Prepared(1), Prepared(1, "no"), told()),
        *(Ask(3, Subject.DECISION, "id"), Answered(3, b"\xc0")),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    """Paths, bytes, and choices included; then the end is seen."""
    here, there = [await Channel.over(end) for end in socket.socketpair()]
    await here.send(message)
    assert await there.receive() == message
    here.close()
    assert await there.receive() is None
    there.close()
