"""The parts of a fleet, computed from its options without processes, sockets or files."""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from base.response_bodies import ResponseBodies
from fleet.envoy.settings import (
    MAX_PIPE_BYTES,
    Address,
    BootstrapConfig,
    Mechanism,
    PipeAddress,
    SocketAddress,
)
from fleet.envoy.tenants import Tenants
from fleet.errors import FleetError
from fleet.run.devices import Gpu, GpuPlacement, place
from fleet.run.process import Program
from worker.kv.access import KEY_VARIABLE

_NONE: Mapping[str, str] = MappingProxyType({})
_LOOPBACK = "127.0.0.1"
PORTS_OF_A_PICKER = 3  # ext_proc, health, HTTP
# This process ends an old Envoy when its time is over; the successor does only if this one died.
_PARENT_OVERTIME_SECONDS = 60
_ENVOYS_AT_ONCE = 3  # whose prefix Envoy numbers its addresses with
_ROLE_LABEL = "llm-d.ai/role"
# Prompts with at least this many tokens to compute go to a prefill worker.
DISAGGREGATED_CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: disagg-profile-handler, parameters: {deciders: {prefill: latency-based-pd-decider}}}
- {type: latency-based-pd-decider, parameters: {nonCachedTokens: 512}}
- {type: prefill-filter}
- {type: decode-filter}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
schedulingProfiles:
- name: prefill
  plugins:
  - {pluginRef: prefill-filter}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
- name: decode
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
# The share of available memory for the KV caches of all workers. They choose their sizes at about
# the same time, before any of them has loaded weights or filled its cache.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of `pointsman up`.

    `model` is an argument of `models.resolve_model`, `devices` one of `devices.choose`.
    `objectives` are YAML documents, see `preflight.read_objectives`. The first `prefill` of the
    `workers` only run prompts for the others; with 0, every worker does both. With `front`, clients
    connect to `pointsman front`. With `tenants`, only their clients are served.
    """

    workers: int = 2
    prefill: int = 0
    engine: str = "torch"
    model: str | None = None
    dtype: str | None = None
    host: str = _LOOPBACK
    port: int = 8080
    config: Path | None = None
    objectives: str = ""
    routing: Mechanism = Mechanism.OVERRIDE_HOST
    buffer_request_body: bool = True
    response_bodies: ResponseBodies = ResponseBodies.OFF
    trust_control_headers: bool = False
    tenants: Tenants | None = None
    allow_experimental_plugins: bool = False
    decision_header: bool = False
    record: Path | None = None
    worker_args: tuple[str, ...] = ()
    devices: str = "all"
    insecure: bool = False
    front: bool = False
    tracing: bool = False
    envoy_concurrency: int = 1
    startup_seconds: float = 120.0
    drain_seconds: float = 10.0

    @property
    def limits_tokens(self) -> bool:
        return self.tenants is not None and self.tenants.limits_tokens

    @property
    def shown_bodies(self) -> ResponseBodies:
        """Return the mode in use: with limits of tokens, the picker sees at least the usage."""
        is_blind = self.response_bodies is ResponseBodies.OFF
        return ResponseBodies.USAGE if is_blind and self.limits_tokens else self.response_bodies

    @property
    def num_ports(self) -> int:
        num_sidecars = self.workers - self.prefill if self.prefill else 0
        return 1 + PORTS_OF_A_PICKER + self.workers + num_sidecars + self.front


@dataclass(frozen=True, slots=True)
class Site:
    """The resources of this machine that the fleet uses.

    `hot_restart_id` is a number by which one Envoy of this fleet finds the next, of at most 27
    bits; None if the machine has no shared memory for that. `decoder_ports` are those of decode
    workers, whose place in `worker_ports` a sidecar takes; `kv_key` is their shared secret.
    `gateway_port` is Envoy's port when clients connect to a front. `dashboard_port` leads to the
    HTTP port of the serving picker.
    """

    folder: Path
    dashboard_port: int
    picker_ports: tuple[int, int, int]  # ext_proc, health, HTTP
    worker_ports: tuple[int, ...]
    cores: int
    envoy: Path
    hot_restart_id: int | None = None
    gpus: tuple[Gpu, ...] = ()
    decoder_ports: tuple[int, ...] = ()
    kv_key: str = ""
    gateway_port: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker and its address, which is that of its `sidecar` if it has one."""

    program: Program
    address: SocketAddress
    sidecar: Program | None = None


@dataclass(frozen=True, slots=True)
class PickerPlan:
    """One picker. `ext_proc` is a socket in the fleet's folder, named by the port of health checks,
    which no other picker has; where the folder's name is too long for that, it is the first port.
    """

    program: Program
    ports: tuple[int, int, int]
    ext_proc: Address
    health: SocketAddress
    http: SocketAddress
    record: Path | None

    @property
    def place(self) -> str:
        at = self.ext_proc
        return at.path if isinstance(at, PipeAddress) else f"{at.host}:{at.port}"


@dataclass(frozen=True, slots=True)
class EnvoyPlan:
    """One Envoy. `again` is run after a crash; `number` counts from 1, `epoch` hot restarts."""

    program: Program
    again: Program
    admin: PipeAddress
    bootstrap: BootstrapConfig
    bootstrap_path: Path
    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    options: FleetOptions
    site: Site
    model: Path | None

    @property
    def workers(self) -> tuple[WorkerPlan, ...]:
        return tuple(self.worker(index, port) for index, port in enumerate(self.site.worker_ports))

    @property
    def placements(self) -> list[GpuPlacement]:
        return place(self.options.workers, self.site.gpus, self._gpus_each)

    @property
    def _gpus_each(self) -> int:
        """The GPUs for each worker; more than exist if it takes none or will refuse its flags."""
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        flags.add_argument("--device", default="auto")
        flags.add_argument("--tensor-parallel-size", default="1", dest="size")
        none = len(self.site.gpus) + 1
        try:
            asked, _ = flags.parse_known_args(self.options.worker_args)
        except argparse.ArgumentError:
            return none
        is_sound = asked.device != "cpu" and asked.size.isdecimal() and int(asked.size) > 0
        return int(asked.size) if is_sound else none

    @property
    def ingress(self) -> SocketAddress:
        return SocketAddress(self.options.host, self.options.port)

    @property
    def dashboard(self) -> SocketAddress:
        return SocketAddress(_LOOPBACK, self.site.dashboard_port)

    @property
    def gateway(self) -> SocketAddress:
        port = self.site.gateway_port
        return self.ingress if port is None else SocketAddress(_LOOPBACK, port)

    @property
    def front(self) -> Program | None:
        if self.site.gateway_port is None:
            return None
        argv = [*_python("fleet.commands.cli"), "front", "--host", self.options.host]
        argv += ["--port", str(self.options.port)]
        argv += ["--gateway", f"http://{_LOOPBACK}:{self.site.gateway_port}"]
        argv += ["--drain-timeout", f"{self.options.drain_seconds:g}", *self._tracing]
        return Program("front", tuple(argv), self.site.folder / "front.log")

    @property
    def endpoints_path(self) -> Path:
        return self.site.folder / "endpoints.yaml"

    @property
    def pool_path(self) -> Path:
        return self.site.folder / "pool.json"

    @property
    def pickers_path(self) -> Path:
        return self.site.folder / "pickers.json"

    @property
    def roles(self) -> dict[str, str]:
        options = self.options
        if not options.prefill:
            return {}
        return {
            worker_name(index): "prefill" if index < options.prefill else "decode"
            for index in range(options.workers)
        }

    @property
    def disaggregated_path(self) -> Path | None:
        if not self.options.prefill or self.options.config is not None:
            return None
        return self.site.folder / "disaggregated.yaml"

    @property
    def control_path(self) -> Path:
        return self.site.folder / "control.sock"

    @property
    def hot_restart_memory(self) -> Path | None:
        """The path of the shared memory, which none of the fleet's Envoys removes."""
        number = self.site.hot_restart_id
        # Envoy multiplies its base id by ten.
        return None if number is None else Path(f"/dev/shm/envoy_shared_memory_{10 * number}")

    def hot_restart_socket(self, epoch: int) -> Path | None:
        if self.site.hot_restart_id is None:
            return None
        number = 10 * self.site.hot_restart_id + epoch % _ENVOYS_AT_ONCE
        return Path(f"{self._hot_restart_path}_parent_{number}")

    @property
    def _hot_restart_path(self) -> Path:
        return self.site.folder / "hot"

    def worker(self, index: int, port: int, beside: WorkerPlan | None = None) -> WorkerPlan:
        """Plan a worker, on other GPUs than `beside`, which it replaces. Raises `FleetError`."""
        options, site = self.options, self.site
        threads = max(1, site.cores // max(1, options.workers))
        name, decodes = worker_name(index), bool(options.prefill) and index >= options.prefill
        own_port = site.decoder_ports[index - options.prefill] if decodes else port
        argv = [*_python("worker.__main__"), "--engine", options.engine]
        argv += ["--host", _LOOPBACK, "--port", str(own_port)]
        argv += ["--shutdown-timeout", f"{options.drain_seconds:g}"]
        if self.model is not None:
            argv += ["--model", str(self.model)]
        if options.dtype is not None:
            argv += ["--dtype", options.dtype]
        # In the fleet's folder, whose removal also removes the sockets of a killed worker.
        environment = {"TMPDIR": str(site.folder)}
        if options.prefill:
            argv += ["--kv-transfer-config", _transfers(decodes)]
            environment[KEY_VARIABLE] = site.kv_key  # other users can read flags
        if options.engine == "torch":
            argv += ["--num-threads", str(threads)]
            placements = self.placements
            if placements:
                placement = placements[index % len(placements)]
                gpus = placement.gpus if beside is None else self._spare_gpus(beside)
                argv += ["--gpu-memory-utilization", f"{placement.memory_share:.4g}"]
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
            elif options.workers > 1:
                share = _MEMORY_SHARE / options.workers
                argv += ["--gpu-memory-utilization", f"{share:.2g}"]
            if options.devices == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            environment["OMP_NUM_THREADS"] = str(threads)
            # The worker has to number devices as this process does: in the order of nvidia-smi.
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        argv += self._tracing
        log = site.folder / f"{name}.log"
        program = Program(name, (*argv, *options.worker_args), log, environment)  # the last wins
        sidecar = self._sidecar(f"sidecar-{index + 1}", port, own_port) if decodes else None
        return WorkerPlan(program, SocketAddress(_LOOPBACK, port), sidecar)

    def _sidecar(self, name: str, port: int, decoder_port: int) -> Program:
        argv = [*_python("fleet.commands.cli"), "sidecar", "--host", _LOOPBACK, "--port", str(port)]
        argv += ["--decoder", f"http://{_LOOPBACK}:{decoder_port}"]
        # Clients can set the header, and must reach no other service with it.
        argv += ["--prefiller-networks", f"{_LOOPBACK}/32"]
        argv += ["--drain-timeout", f"{self.options.drain_seconds:g}", *self._tracing]
        return Program(name, tuple(argv), self.site.folder / f"{name}.log")

    def _spare_gpus(self, beside: WorkerPlan) -> list[Gpu]:
        taken = beside.program.environment["CUDA_VISIBLE_DEVICES"].split(",")
        spare = [gpu for gpu in self.site.gpus if gpu.uuid not in taken]
        if len(spare) < self._gpus_each:
            raise FleetError(
                f"{beside.program.name} is the only worker, and no GPU is free for a new one beside"
                " it: run two workers (--workers 2), or end the fleet and start it again"
            )
        return spare[: self._gpus_each]

    def picker(
        self, ports: tuple[int, int, int] | None = None, record: Path | None = None
    ) -> PickerPlan:
        """Plan a picker that records into `record` or, if that is None, into `options.record`."""
        options, site = self.options, self.site
        ports = site.picker_ports if ports is None else ports
        record = options.record if record is None else record
        health, http = (SocketAddress(_LOOPBACK, port) for port in ports[1:])
        pipe = PipeAddress(str(site.folder.absolute() / f"picker-{ports[1]}.sock"))
        ext_proc: Address = pipe
        listening = ["--bind-address", f"unix://{pipe.path}"]
        if len(os.fsencode(pipe.path)) > MAX_PIPE_BYTES:
            ext_proc = SocketAddress(_LOOPBACK, ports[0])
            listening = ["--bind-address", _LOOPBACK, "--grpc-port", str(ports[0])]
        argv = [*_python("picker.__main__"), "--endpoints-file", str(self.endpoints_path)]
        argv += [*listening, "--grpc-health-port", str(health.port)]
        argv += ["--metrics-port", str(http.port)]
        argv += ["--drain-timeout", f"{options.drain_seconds:g}s"]
        argv += ["--response-bodies", options.shown_bodies.value]
        if options.limits_tokens:
            argv.append("--token-limits")
        if record is not None:
            argv += ["--record", str(record)]
        config = options.config or self.disaggregated_path
        if config is not None:
            argv += ["--config-file", str(config)]
        if options.allow_experimental_plugins:
            argv.append("--allow-experimental-plugins")
        if options.decision_header:
            argv.append("--decision-header")
        argv += self._tracing
        program = Program("picker", tuple(argv), site.folder / "picker.log")
        return PickerPlan(program, ports, ext_proc, health, http, record)

    @property
    def _tracing(self) -> list[str]:
        return ["--tracing"] if self.options.tracing else []

    def envoy(self, number: int = 1, epoch: int = 0) -> EnvoyPlan:
        """Plan Envoy number `number`; it takes over from its predecessor unless `epoch` is 0."""
        options, folder = self.options, self.site.folder
        suffix = "" if number == 1 else f"-{number}"
        path = folder / f"envoy{suffix}.yaml"
        admin = PipeAddress(str(folder / f"envoy{suffix}.sock"))
        first = self.picker()
        return EnvoyPlan(
            program=self._envoy_program(path, epoch),
            again=self._envoy_program(path, 0),  # a crash leaves nothing to take over
            admin=admin,
            bootstrap=BootstrapConfig(
                listen=self.gateway,
                admin=admin,
                picker=first.ext_proc,
                picker_health=first.health,
                pickers_file=str(self.pickers_path),
                endpoints=tuple(worker.address for worker in self.workers),
                endpoints_file=str(self.pool_path),
                mechanism=options.routing,
                buffer_request_body=options.buffer_request_body,
                response_bodies=options.shown_bodies,
                trust_control_headers=options.trust_control_headers,
                tenants=options.tenants,
                welcome=self._welcome,
            ),
            bootstrap_path=path,
            number=number,
            epoch=epoch,
        )

    @property
    def _welcome(self) -> str:
        rows = {
            "models": "/v1/models",
            "OpenAI API": "/v1/chat/completions and others, see /openapi.json",
            "dashboard": self.dashboard.url,
            "metrics": f"{self.dashboard.url}/metrics",
        }
        listed = "".join(f"{name:<12}{text}\n" for name, text in rows.items())
        return f"Pointsman: a fleet on this machine.\n\n{listed}"

    def _envoy_program(self, bootstrap_path: Path, epoch: int) -> Program:
        options, site = self.options, self.site
        argv = [str(site.envoy), "-c", str(bootstrap_path)]
        argv += ["--concurrency", str(options.envoy_concurrency), "--log-level", "warn"]
        argv += self._hot_restart(epoch)
        return Program("envoy", tuple(argv), site.folder / "envoy.log")

    def _hot_restart(self, epoch: int) -> list[str]:
        number, drain = self.site.hot_restart_id, max(1, math.ceil(self.options.drain_seconds))
        if number is None:
            return ["--disable-hot-restart"]
        return [
            *("--base-id", str(number), "--restart-epoch", str(epoch)),
            # In a private folder, because the default lets any user of the machine connect.
            *("--socket-path", str(self._hot_restart_path), "--socket-mode", "600"),
            # Every connection ends with its next answer; the default ends them gradually.
            *("--drain-time-s", str(drain), "--drain-strategy", "immediate"),
            *("--parent-shutdown-time-s", str(drain + _PARENT_OVERTIME_SECONDS)),
            # An Envoy that asks a dead predecessor for its statistics hangs for ever (measured).
            "--skip-hot-restart-parent-stats",
            # If the old one dies meanwhile, there is nothing to take over.
            *(["--skip-hot-restart-on-no-parent"] if epoch else []),
        ]


def endpoints_yaml(
    addresses: Mapping[str, SocketAddress], objectives: str = "", roles: Mapping[str, str] = _NONE
) -> str:
    entries: list[dict[str, object]] = []
    for name, address in addresses.items():
        entry = {"name": name, "address": address.host, "port": str(address.port)}
        labels = {"labels": {_ROLE_LABEL: roles[name]}} if name in roles else {}
        entries.append({**entry, **labels})
    listed = yaml.safe_dump({"endpoints": entries}, sort_keys=False)
    return f"{listed}---\n{objectives}" if objectives else listed


def _transfers(decodes: bool) -> str:
    role = "kv_consumer" if decodes else "kv_producer"
    # Any free port: each request carries it.
    return json.dumps({"kv_connector": "TcpConnector", "kv_role": role, "kv_port": 0})


def worker_name(index: int) -> str:
    return f"worker-{index + 1}"


def _python(module: str) -> tuple[str, ...]:
    """Return a module's command. `scripts/one_package.py` changes names, so pass the whole one."""
    # -P: do not import a folder of the current directory that has the name of one of our packages.
    return (sys.executable, "-P", "-m", module.removesuffix(".__main__"))
