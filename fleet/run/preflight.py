"""Checks before `pointsman up` starts or downloads anything."""

import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from base.flags import LAST_PORT, Parser
from fleet.errors import FleetError, UsageError
from fleet.run import devices
from fleet.run.layout import FleetOptions, FleetPlan
from fleet.run.ports import require_free
from picker.cli import flags as picker_flags
from picker.config.findings import InvalidConfigError, Severity
from picker.errors import ConfigError, PickerError
from worker.cli import flags as worker_flags
from worker.cli.server import read_chat_template
from worker.errors import WorkerError
from worker.tokenizer.checkpoint import read_checkpoint

POOL_NAME = "default"  # of a fleet's picker
MAX_WORKERS = 256  # 13 GB of simulators; a larger number is probably a typing error
_FREE_BYTES_NEEDED = 50_000_000  # for logs
# Worker flags that `up` sets itself, or that its Envoy and picker could not follow.
_OWN = re.compile(
    r"--(?:host|port|uds|ssl-\w+|engine|model|shutdown-timeout|api-key)(?:=.*)?", re.DOTALL
)


def check_options(options: FleetOptions) -> list[devices.Gpu]:
    """Return the GPUs to use. Raises `FleetError`, and `UsageError` for impossible flags."""
    if not 1 <= options.workers <= MAX_WORKERS:
        flags = "--prefill and --decode together are" if options.prefill else "--workers is"
        raise UsageError(
            f"{flags} between 1 and {MAX_WORKERS}, not {options.workers}: each one is two "
            "processes of at least 50 MB together"
        )
    needed = options.num_ports
    if options.port + needed > LAST_PORT:
        raise UsageError(
            f"--port {options.port} leaves no room for the {needed} ports behind it: take "
            f"{LAST_PORT - needed} or less"
        )
    try:
        address = ipaddress.ip_address(options.host)
    except ValueError as error:
        text = f"--host takes an IP address of this machine or localhost, not {options.host!r}"
        raise UsageError(text) from error
    if not address.is_loopback and not options.insecure:
        lacks = "authentication" if options.tenants is None else "TLS, so keys can be read"
        raise UsageError(
            f"--host {options.host} can be reached from other machines and there is no "
            f"{lacks}; add --insecure to do it all the same"
        )
    if options.record is not None:
        _check_record(options.record)
    if options.config is not None:
        _check_config(options.config, allow_experimental=options.allow_experimental_plugins)
    _check_worker_args(options.worker_args)
    require_free(options.host, options.port)
    temporary = tempfile.gettempdir()
    if shutil.disk_usage(temporary).free < _FREE_BYTES_NEEDED:
        raise FleetError(f"{temporary} is full: {_FREE_BYTES_NEEDED / 1e6:.0f} MB are needed there")
    if options.engine != "torch":
        return []
    return devices.choose(options.devices, devices.find(os.environ))


def read_objectives(path: Path, say: Callable[[str], None], *, clients_may_name: bool) -> str:
    """Read documents for the endpoints file. Raises `FleetError` if any would be skipped."""
    from picker.config.pool_file import read_policies  # noqa: PLC0415 (slow, as in _check_config)

    try:
        content = path.read_bytes()
        read = read_policies(content, str(path), POOL_NAME)
    except OSError as error:
        text = f"--objectives: cannot read {path}: {error.strerror or error}"
        raise UsageError(text) from error
    except ConfigError as error:
        raise UsageError(f"--objectives: {error}") from error
    errors = [str(one) for one in read.findings if one.severity is Severity.ERROR]
    if errors:
        raise UsageError("\n".join(errors))
    for finding in read.findings:
        say(f"warning: {finding}")
    if read.contents.rules.objectives and not clients_may_name:
        say("warning: Envoy strips the header that names an objective; see --trust-control-headers")
    return content.decode("utf-8-sig")


def check_programs(layout: FleetPlan) -> None:
    """Raise `UsageError` for flags that the parsers of picker and worker would refuse."""
    given = layout.picker().program.argv
    parser = picker_flags.build_parser()
    parser.prog = "pointsman up"
    try:
        picker_flags.options_of(parser.parse_args(_flags(given)))
    except ConfigError as error:
        raise UsageError(str(error)) from error
    given = layout.workers[0].program.argv
    options = _worker_parser().parse_args(_flags(given))
    try:
        is_sim = options.engine == "sim"
        model = layout.model
        checkpoint = None if model is None else read_checkpoint(model, any_architecture=is_sim)
        worker_flags.resolve(options, checkpoint, os.environ, read_chat_template(options))
    except WorkerError as error:
        where = "--worker-args: " if layout.options.worker_args else ""
        raise UsageError(f"{where}{error}") from error


def _flags(argv: Sequence[str]) -> list[str]:
    return list(argv[argv.index("-m") + 2 :])


def _worker_parser() -> Parser:
    parser = worker_flags.build_parser()
    parser.prog = "pointsman up: --worker-args"
    return parser


def _check_worker_args(argv: Sequence[str]) -> None:
    for word in argv:
        if word in ("-h", "--help"):
            raise UsageError(
                "--worker-args takes flags of `pointsman worker`, whose --help has them"
            )
        if _OWN.fullmatch(word):
            name = word.partition("=")[0]
            raise UsageError(f"--worker-args cannot have {name}: `pointsman up` sets it itself")
    _worker_parser().parse_args(list(argv))


def _check_record(path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"--record takes a file, and {path} is a folder")
    if not folder.is_dir():
        raise UsageError(f"--record {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"--record {path}: may not be written")


def _check_config(path: Path, *, allow_experimental: bool) -> None:
    # Not needed without --config, and slow to import.
    from picker.config.build import BuildOptions, check_config  # noqa: PLC0415
    from picker.config.catalog import builtin_plugins  # noqa: PLC0415
    from picker.config.watch import read_config_file  # noqa: PLC0415

    if not path.is_file():
        raise UsageError(f"--config: there is no configuration file at {path}")
    try:
        content = read_config_file(path, "--config")
        allow = BuildOptions(allow_experimental=allow_experimental)
        found = check_config(content, str(path), builtin_plugins(), allow)
    except InvalidConfigError as error:
        found = error.findings
    except PickerError as error:
        raise UsageError(str(error)) from error
    errors = [one for one in found if one.severity is Severity.ERROR]
    if errors:
        more = f"; `pointsman config check {path}` lists all {len(errors)} errors"
        raise UsageError(f"--config {errors[0]}{more if len(errors) > 1 else ''}")
