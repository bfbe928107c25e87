"""Checks of a picker, by what it says at its HTTP port."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from fleet.doctor.facts import Facts, PickerFacts
from fleet.doctor.findings import Check, Finding, error, warning
from picker.admin.views import EndpointView
from picker.config.build import BuildOptions
from picker.config.catalog import builtin_plugins
from picker.config.check import check_config

STALE_SECONDS = 5.0  # an idle pool is asked once a second
SKEW_SECONDS = 5.0  # the header that tells has whole seconds
LEAST_FILES = 512
FILES_PER_ENDPOINT = 4  # scrapes, probes and subscriptions
FILES_SHARE = 0.8
EXPIRY_WARNING_DAYS = 14.0
# With an election all but one are so; those that wait for the first leader, or cannot ask, are not.
_STANDS_BY = re.compile(r"stands by; the leader is (?!nobody yet)")
_EXPERIMENTAL = "is experimental"
_SHOWN = 5
_ENDPOINTS = "llm_d_epp_ready_endpoints"
_SCRAPES_FAILED = "llm_d_epp_datalayer_poll_errors_total"
_PAGES_LACKING = "llm_d_epp_datalayer_extract_errors_total"


def _of_picker(
    judge: Callable[[PickerFacts], Iterable[Finding]],
) -> Callable[[Facts], Iterator[Finding]]:
    """A judge of a picker that answers."""

    def judged(facts: Facts) -> Iterator[Finding]:
        if facts.picker is not None and facts.picker.problem is None:
            yield from judge(facts.picker)

    return judged


def _reachable(facts: Facts) -> Iterator[Finding]:
    picker = facts.picker
    if picker is not None and picker.problem is not None:
        yield error(
            f"{picker.url}: {picker.problem}",
            "without a picker Envoy decides by itself, or refuses every request",
            "start one (`pointsman up`, `pointsman picker`), or name its --metrics-port with "
            "--picker URL; in a cluster: kubectl port-forward deploy/pointsman-picker 9090",
        )


def _ready(picker: PickerFacts) -> Iterator[Finding]:
    first, _, detail = picker.readiness.partition("\n")
    if not picker.is_ready and _STANDS_BY.match(detail):
        return
    if not picker.is_ready:
        yield error(
            f"{picker.url}/readyz: {first or 'not ready'}" + (f" ({detail})" if detail else ""),
            "gateways send nothing to a picker that is not ready",
            f"it is ready once its pool is known: {detail or 'see its log'}; a picker that drains "
            "is not ready on purpose",
        )
    elif detail:
        yield warning(
            f"{picker.url}/readyz: {detail}",
            "it goes on with what it knew; endpoints that changed since are not seen",
            "see that what it follows (endpoints file, API server) can be read, and its log",
        )


def _endpoints(picker: PickerFacts) -> Iterator[Finding]:
    if picker.is_ready and not picker.endpoints:
        yield error(
            f"{picker.url}/endpoints: none",
            "every request is a 503",
            "add some to the endpoints file (`pointsman config check --endpoints-file FILE`), or "
            "give Pods the labels of the pool's selector and see that they are ready",
        )


def _scrapes(picker: PickerFacts) -> Iterator[Finding]:
    blind = [one for one in picker.endpoints if _is_blind(one)]
    if blind:
        failed = picker.metrics.get(_SCRAPES_FAILED, 0.0)
        told = ", ".join(_age(one) for one in blind[:_SHOWN])
        more = f" and {len(blind) - _SHOWN} more" if len(blind) > _SHOWN else ""
        everybody = len(blind) == len(picker.endpoints)
        yield (error if everybody else warning)(
            f"{len(blind)} of {len(picker.endpoints)} endpoints without fresh metrics: {told}{more}"
            f" ({failed:g} scrapes failed since the start)",
            "their load is not known: they are picked blindly, or not at all",
            f"curl http://{blind[0].address}/metrics from where the picker runs; if another port "
            "or path answers, set it in the pool (targetPorts) or in the configuration's dataLayer",
        )
    lacking = picker.metrics.get(_PAGES_LACKING, 0.0)
    if lacking and not blind:
        yield warning(
            f"{lacking:g} metrics pages lacked a series or had an unusable value",
            "what an engine does not say counts as 0: it looks idle",
            "name the engine: label llm-d.ai/engine-type: sglang (vllm, trtllm-serve, triton) on "
            "the Pods or endpoints",
        )


def _is_blind(one: EndpointView) -> bool:
    age = one.metrics_age_seconds
    return one.metrics is None or age is None or age > STALE_SECONDS


def _age(one: EndpointView) -> str:
    age = one.metrics_age_seconds
    return f"{one.key} ({'never read' if age is None else f'{age:.1f} s old'})"


def _health(picker: PickerFacts) -> Iterator[Finding]:
    for one in picker.endpoints:
        if one.health.state != "healthy":
            yield warning(
                f"{one.key} ({one.address}) is {one.health.state} after "
                f"{one.health.consecutive_failures} failures in a row",
                "requests are kept away from it until it answers again",
                f"curl http://{one.address}/health from where the picker runs, and its log",
            )


def _queues(picker: PickerFacts) -> Iterator[Finding]:
    queues = picker.queues
    if queues.is_on and queues.queued_requests and queues.saturation >= 1.0:
        yield warning(
            f"{queues.queued_requests} requests wait; the pool's saturation is "
            f"{queues.saturation:.2f} ({queues.detector})",
            "clients wait for a place, and are refused (429) once their time is over",
            "add workers, or see docs/flow-control.md for limits and priorities; "
            "`pointsman top` shows who waits",
        )


def _gauges(picker: PickerFacts) -> Iterator[Finding]:
    told = picker.metrics.get(_ENDPOINTS)
    if told is None:
        yield warning(
            f"{picker.url}/metrics has no {_ENDPOINTS}",
            "dashboards, alerts and autoscalers of the pool see nothing",
            "is this a picker of ours? see `curl PICKER/metrics` and docs/metrics.md",
        )


def _config(picker: PickerFacts) -> Iterator[Finding]:
    config = picker.config
    if config is None:
        return
    if config.last_error is not None:
        yield error(
            f"{config.source}: {config.last_error}",
            "the changed file is not in use: the picker goes on with what was before, and will not "
            "start again with it",
            f"pointsman config check {config.source}",
        )
    for text in config.warnings:
        yield warning(
            f"{config.source}: {text}",
            "the picker doubts that it was meant so",
            f"pointsman config check {config.source}",
        )


def _experimental(picker: PickerFacts) -> Iterator[Finding]:
    if picker.config is None:
        return
    content = picker.config.written.encode(errors="surrogatepass")
    options = BuildOptions(allow_experimental=False)
    for one in check_config(content, picker.config.source, builtin_plugins(), options):
        if _EXPERIMENTAL in str(one):
            yield warning(
                str(one).partition(";")[0],
                "its parameters and behaviour may change with any release",
                "take it out, or pin the picker's version and read CHANGELOG.md before an update",
            )


def _files(picker: PickerFacts) -> Iterator[Finding]:
    if picker.files is None:
        return
    used, limit = picker.files
    if used > FILES_SHARE * limit:
        yield error(
            f"the picker has {used} of {limit} file descriptors open",
            "without one it takes no connection and scrapes no endpoint",
            "ulimit -n 65536 before it starts (systemd: LimitNOFILE=65536)",
        )
    elif limit < LEAST_FILES + FILES_PER_ENDPOINT * len(picker.endpoints):
        yield warning(
            f"the picker may open {limit} files and has {len(picker.endpoints)} endpoints",
            "it keeps a connection to every endpoint and one to every proxy's thread",
            "ulimit -n 65536 before it starts (systemd: LimitNOFILE=65536)",
        )


def _clock(picker: PickerFacts) -> Iterator[Finding]:
    ahead = picker.ahead_seconds
    if ahead is not None and abs(ahead) > SKEW_SECONDS:
        yield warning(
            f"the picker's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} "
            "this machine's",
            "certificates, leases and tokens are judged by it, and logs do not fit together",
            "chronyc tracking on both machines; start a time daemon (systemctl start chronyd)",
        )


def _certificates(facts: Facts) -> Iterator[Finding]:
    for one in facts.certificates:
        days = one.days_left
        if one.problem is not None:
            yield error(
                f"{one.address}: {one.problem}",
                "who insists on TLS cannot connect",
                "see --cert-path of the picker, and that the port is the one meant",
            )
        elif days is not None and days < EXPIRY_WARNING_DAYS:
            left = f"ended {-days:.0f} days ago" if days < 0 else f"ends in {days:.1f} days"
            yield (error if days < 0 else warning)(
                f"{one.address}: its certificate {left}",
                "whoever verifies it refuses the connection from then on",
                "renew tls.crt and tls.key in --cert-path; the picker takes them without a restart",
            )


CHECKS = (
    Check("picker-reachable", "a picker answers", _reachable),
    Check("picker-ready", "it is ready, and its pool is current", _of_picker(_ready)),
    Check("picker-endpoints", "it knows endpoints", _of_picker(_endpoints)),
    Check("picker-scrapes", "it knows how busy they are", _of_picker(_scrapes)),
    Check("picker-health", "no endpoint is held back", _of_picker(_health)),
    Check("picker-queues", "nobody waits for a full pool", _of_picker(_queues)),
    Check("picker-gauges", "the pool's series are there", _of_picker(_gauges)),
    Check("picker-config", "its configuration is the file's", _of_picker(_config)),
    Check("picker-experimental", "no experimental plugins", _of_picker(_experimental)),
    Check("picker-files", "it may open enough files", _of_picker(_files)),
    Check("picker-clock", "its clock is right", _of_picker(_clock)),
    Check("tls-expiry", "certificates are valid", _certificates),
)
