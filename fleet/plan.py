"""What a fleet consists of, worked out from its options: no process, no socket, no file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from fleet.envoy.settings import BootstrapConfig, Mechanism, PipeAddress, SocketAddress
from fleet.process import Program

_LOOPBACK = "127.0.0.1"
PORTS_BESIDE_WORKERS = 3  # picker: ext_proc, health, HTTP


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked `pointsman up` for.

    `model` is what `models.resolve_model` takes; None is the default model. `config` is the
    picker's configuration file, `record` where its decisions are written down. `objectives` are
    YAML documents, see `objectives.read_objectives`. `worker_args` are added to every worker's
    command line. `buffer_request_body` and `trust_control_headers` are those of `BootstrapConfig`,
    `allow_experimental_plugins` is the picker's flag.
    """

    workers: int = 2
    engine: str = "torch"
    model: str | None = None
    dtype: str | None = None
    host: str = _LOOPBACK
    port: int = 8080
    config: Path | None = None
    objectives: str = ""
    routing: Mechanism = Mechanism.OVERRIDE_HOST
    buffer_request_body: bool = True
    trust_control_headers: bool = False
    allow_experimental_plugins: bool = False
    picker_processes: int = 1
    record: Path | None = None
    worker_args: tuple[str, ...] = ()
    insecure: bool = False
    envoy_concurrency: int = 1
    startup_seconds: float = 120.0
    drain_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where this machine lets the fleet live: a private folder, free ports, cores, the proxy."""

    folder: Path
    picker_ports: tuple[int, int, int]  # ext_proc, health, HTTP
    worker_ports: tuple[int, ...]
    cores: int
    envoy: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """The programs of a fleet, the files they read (by path), and where they answer."""

    workers: tuple[Program, ...]
    worker_addresses: tuple[SocketAddress, ...]
    picker: Program
    picker_http: SocketAddress
    envoy: Program
    ingress: SocketAddress
    admin: PipeAddress
    bootstrap: BootstrapConfig
    bootstrap_path: Path
    endpoints_path: Path
    endpoints: str


def plan(options: Options, site: Site, model: Path | None) -> Plan:
    """Lay a fleet out. `model` None: the simulator runs without one."""
    ext_proc, health, http = site.picker_ports
    addresses = tuple(SocketAddress(_LOOPBACK, port) for port in site.worker_ports)
    admin = PipeAddress(str(site.folder / "envoy.sock"))
    bootstrap_path = site.folder / "envoy.yaml"
    endpoints_path = site.folder / "endpoints.yaml"
    ingress = SocketAddress(options.host, options.port)
    return Plan(
        workers=tuple(
            _worker(options, site, model, index) for index in range(len(site.worker_ports))
        ),
        worker_addresses=addresses,
        picker=_picker(options, site, endpoints_path),
        picker_http=SocketAddress(_LOOPBACK, http),
        envoy=_envoy(options, site, bootstrap_path),
        ingress=ingress,
        admin=admin,
        bootstrap=BootstrapConfig(
            listen=ingress,
            admin=admin,
            picker=SocketAddress(_LOOPBACK, ext_proc),
            picker_health=SocketAddress(_LOOPBACK, health),
            endpoints=addresses,
            mechanism=options.routing,
            buffer_request_body=options.buffer_request_body,
            trust_control_headers=options.trust_control_headers,
        ),
        bootstrap_path=bootstrap_path,
        endpoints_path=endpoints_path,
        endpoints=endpoints_yaml(addresses, options.objectives),
    )


def endpoints_yaml(addresses: tuple[SocketAddress, ...], objectives: str = "") -> str:
    """The file the picker learns its pool from, and what requests stand for."""
    entries = [
        {"name": worker_name(index), "address": address.host, "port": str(address.port)}
        for index, address in enumerate(addresses)
    ]
    listed = yaml.safe_dump({"endpoints": entries}, sort_keys=False)
    return f"{listed}---\n{objectives}" if objectives else listed


def worker_name(index: int) -> str:
    """Names count from 1."""
    return f"worker-{index + 1}"


def _python(module: str) -> tuple[str, ...]:
    # -P: a folder named like one of our packages, where the user happens to be, is not ours.
    return (sys.executable, "-P", "-m", module)


def _worker(options: Options, site: Site, model: Path | None, index: int) -> Program:
    threads = max(1, site.cores // max(1, options.workers))
    argv = [*_python("worker"), "--engine", options.engine]
    argv += ["--host", _LOOPBACK, "--port", str(site.worker_ports[index])]
    argv += ["--shutdown-timeout", f"{options.drain_seconds:g}"]
    if model is not None:
        argv += ["--model", str(model)]
    if options.dtype is not None:
        argv += ["--dtype", options.dtype]
    # In our folder, so that what a killed worker could not remove goes with it.
    environment = {"TMPDIR": str(site.folder)}
    if options.engine == "torch":
        argv += ["--num-threads", str(threads)]
        environment["OMP_NUM_THREADS"] = str(threads)
    name = worker_name(index)
    log = site.folder / f"{name}.log"
    return Program(name, (*argv, *options.worker_args), log, environment)


def _picker(options: Options, site: Site, endpoints_path: Path) -> Program:
    ext_proc, health, http = (str(port) for port in site.picker_ports)
    argv = [*_python("picker"), "--endpoints-file", str(endpoints_path)]
    argv += ["--bind-address", _LOOPBACK, "--grpc-port", ext_proc]
    argv += ["--grpc-health-port", health, "--metrics-port", http]
    argv += ["--drain-timeout", f"{options.drain_seconds:g}s"]
    if options.picker_processes != 1:
        argv += ["--processes", str(options.picker_processes)]
    if options.record is not None:
        argv += ["--record", str(options.record)]
    if options.config is not None:
        argv += ["--config-file", str(options.config)]
    if options.allow_experimental_plugins:
        argv.append("--allow-experimental-plugins")
    return Program("picker", tuple(argv), site.folder / "picker.log")


def _envoy(options: Options, site: Site, bootstrap_path: Path) -> Program:
    argv = [str(site.envoy), "-c", str(bootstrap_path)]
    # Without hot restart two fleets on one machine share nothing.
    argv += ["--disable-hot-restart", "--concurrency", str(options.envoy_concurrency)]
    argv += ["--log-level", "warn"]
    return Program("envoy", tuple(argv), site.folder / "envoy.log")
