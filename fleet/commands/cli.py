"""The `pointsman` command. A subcommand's room is imported only when the subcommand runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from os import environ
from typing import TYPE_CHECKING

from base.flags import near
from fleet.broken_pipe import status_of
from fleet.command_lines import LINES, parser_of
from fleet.errors import FleetError, UsageError

if TYPE_CHECKING:
    from fleet.run.models import Progress

_OURS = ("pointsman", "base", "picker", "worker", "fleet")
_SHELVES = ("picker.planner", "worker.sim", "worker.training")
_NOT_ON_WINDOWS = ("fcntl", "resource", "termios", "tty", "uvloop")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status; an error is one line on stderr and status 1, or 2 for a wrong command
    line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return status_of(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    try:
        for word in arguments:
            if "\0" in word or word.endswith("=--"):  # argparse makes an empty list of `--`
                raise UsageError(f"{word!r} is no value of a flag")
        if name in ("-h", "--help", "help"):
            commands = [f"  {name:<13}{command.about}" for name, command in LINES.items()]
            print(_ABOUT, "", "usage: pointsman COMMAND [FLAG …]", "", *commands, sep="\n")
            print("\n`pointsman COMMAND --help` has the flags of a command.")
            return 0
        if name in ("-V", "--version"):
            name = "version"
        if name not in LINES:
            known = "" if name.startswith("-") else near(name, LINES)
            raise UsageError(f"there is no command {name}{known} (see pointsman --help)")
        return _COMMANDS[name](arguments[1:])
    except FleetError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        # A missing module of ours is a fault, and no extra brings it.
        if error.name not in _SHELVES and (error.name or "").partition(".")[0] in ("", *_OURS):
            raise
        print(f"pointsman: {_missing(name, error.name)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _missing(name: str, module: str | None) -> str:
    """Say what the command `name` needs, where `module` is not there to import."""
    if module in _SHELVES:
        return f"{name} needs {module}, which is not installed"
    if module in _NOT_ON_WINDOWS and sys.platform == "win32":
        return f"{name} needs Linux: use WSL2 or a container"
    from fleet.extras import install_command

    return f"`pointsman {name}` needs {module}: {install_command(_EXTRAS.get(name, ''))}"


def _calls(name: str, module: str, function: str, *others: object) -> Callable[[list[str]], int]:
    def run(argv: list[str]) -> int:
        given = parser_of(name).parse_args(argv)
        if extra := _EXTRAS.get(name):
            _require(name, extra)
        status: int = getattr(import_module(module), function)(given, *others)
        return status

    return run


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _print_now(line: str) -> None:
    print(line, flush=True)


def _require(name: str, extra: str) -> None:
    from fleet.extras import require_extra

    require_extra(f"pointsman {name}", extra)


def _up(argv: list[str]) -> int:
    arguments = parser_of("up").parse_args(_joined(argv, "--worker-args"))
    if (arguments.prefill is None) is not (arguments.decode is None):
        raise UsageError("--prefill and --decode go together: give both, or neither")
    _require("up", "fleet" if arguments.engine == "torch" else "sim")
    from base.response_bodies import ResponseBodies
    from fleet.envoy.settings import Mechanism
    from fleet.envoy.tenants import read_tenants
    from fleet.run.layout import FleetOptions
    from fleet.run.preflight import check_options, read_objectives

    def say(line: str) -> None:
        print(line, flush=True)

    given = vars(arguments)
    path, trust, file = given["objectives"], arguments.trust_control_headers, given["tenants"]
    if file is not None and trust:
        raise UsageError(
            "--tenants and --trust-control-headers exclude each other: clients that may name any "
            "tenant need no keys"
        )
    tenants = None if file is None else read_tenants(file, environ)
    trust = trust or tenants is not None  # by their gateway
    given |= {
        "tenants": tenants,
        "objectives": "" if path is None else read_objectives(path, say, clients_may_name=trust),
        "routing": Mechanism(arguments.routing),
        "response_bodies": ResponseBodies(arguments.response_bodies),
        "buffer_request_body": given.pop("request_body") == "buffered",
        "startup_seconds": given.pop("startup_timeout"),
        "drain_seconds": given.pop("drain_timeout"),
    }
    prefill, decode = given.pop("prefill"), given.pop("decode")
    if prefill is not None:
        given |= {"prefill": prefill, "workers": prefill + decode}
    options = FleetOptions(**given)
    gpus = check_options(options)
    # Flags are refused before what runs a fleet is imported.
    from fleet.run.up import up

    with _progress() as progress:
        return up(options, gpus, say, progress)


def _joined(argv: list[str], flag: str) -> list[str]:
    """Join `flag` to its value by `=`: argparse refuses a separate one that begins with a dash."""
    if flag not in argv[:-1]:
        return argv
    at = argv.index(flag)
    return [*argv[:at], f"{flag}={argv[at + 1]}", *_joined(argv[at + 2 :], flag)]


def _chat(argv: list[str]) -> int:
    arguments = parser_of("chat").parse_args(argv)
    from os import environ
    from shutil import get_terminal_size

    from fleet.commands.chat import ChatOptions, Terminal, Wrapped, chat
    from fleet.run.catalog import CatalogModel
    from fleet.run.models import ensure_model
    from fleet.run.running_picker import running_fleets

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history in input())
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    fleets = [fleet for fleet in running_fleets(environ) if fleet.url is not None]
    here = [fleet for fleet in fleets if arguments.url in (None, fleet.url)]
    if here:
        given |= {"url": here[0].url, "picker": here[0].picker}
    has_user = sys.stdin.isatty() and sys.stdout.isatty()
    if has_user and len(here) > 1:
        others = ", ".join(str(fleet.url) for fleet in here[1:])
        print(f"{len(here)} fleets run here; --url names others: {others}", file=sys.stderr)

    def note(line: str) -> None:
        print(line, end="", file=sys.stderr, flush=True)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    def fetch(model: CatalogModel) -> None:
        with _progress() as progress:
            ensure_model(model, progress)

    terminal = Terminal(
        Wrapped(write, lambda: get_terminal_size().columns) if has_user else write,
        lambda prompt: input(prompt if has_user else ""),
        note if has_user else None,
    )
    return chat(ChatOptions(**given), terminal, fetch if here else None)


def _top(argv: list[str]) -> int:
    arguments = parser_of("top").parse_args(argv)
    from fleet.commands.top import console_and_keyboard, top
    from fleet.run.running_picker import picker_url

    url = picker_url(arguments.picker, environ)
    return top(url, *console_and_keyboard(), once=arguments.once)


def _explain(argv: list[str]) -> int:
    arguments = parser_of("explain").parse_args(argv)
    from rich.console import Console

    from fleet.commands.explain import ExplainOptions, explain
    from fleet.run.running_picker import picker_url, which_of_several

    url = picker_url(arguments.picker, environ)
    note = which_of_several(arguments.picker, environ)
    if note is not None:
        print(note, file=sys.stderr)
    return explain(ExplainOptions(url, arguments.id, arguments.json, arguments.all), Console())


def _version(argv: list[str]) -> int:
    parser_of("version").parse_args(argv)
    from importlib.metadata import version

    print(f"pointsman {version('pointsman')}")
    return 0


def _worker(argv: list[str]) -> int:
    arguments = parser_of("worker").parse_args(argv)
    _require("worker", "worker" if arguments.engine == "torch" else "sim")
    argv = with_default_model(argv)
    from worker.__main__ import main as worker_main

    return worker_main(argv)


def _picker(argv: list[str]) -> int:
    from picker.cli.flags import options_of
    from picker.errors import ConfigError

    parser = parser_of("picker")
    try:
        options_of(parser.parse_args(argv))
    except ConfigError as error:
        parser.error(str(error))
    from picker.__main__ import main as picker_main

    return picker_main(argv)


def _replay(argv: list[str]) -> int:
    given = parser_of("replay").parse_args(argv)
    from rich.console import Console

    from fleet.commands.replay import replay_command

    return replay_command(given, Console(), _note)


def _bench(argv: list[str]) -> int:
    from fleet.bench.flags import read_settings

    given = parser_of("bench").parse_args(argv)
    if hasattr(given, "is_offline"):
        _require("bench offline", "worker")
        from fleet.bench.offline.command import offline_command

        return offline_command(given, _print_now)
    read_settings(argv)
    from rich.console import Console

    from fleet.bench.command import bench_command

    return bench_command(argv, print, Console(stderr=True))


def _simulate(argv: list[str]) -> int:
    from fleet.sim.flags import read_settings

    read_settings(argv)
    _require("simulate", "sim")
    from fleet.sim.command import simulate_command

    return simulate_command(argv, _print_now, _note)


def _models(argv: list[str]) -> int:
    arguments = parser_of("models").parse_args(argv)
    from fleet.run.catalog import CATALOG
    from fleet.run.models import catalog_model, ensure_model, listing

    if arguments.action is None:
        print(*listing(), sep="\n")
        return 0
    model = catalog_model(arguments.name)
    if model is None:
        known = near(arguments.name, [one.name for one in CATALOG])
        raise UsageError(f"there is no model {arguments.name}{known} (see pointsman models)")
    with _progress() as progress:
        print(ensure_model(model, progress))
    return 0


def _completion(argv: list[str]) -> int:
    arguments = parser_of("completion").parse_args(argv)
    from fleet.commands.completion import script

    print(script(arguments.shell, {name: parser_of(name) for name in LINES}), end="")
    return 0


def _train_draft(argv: list[str]) -> int:
    parser_of("train-draft").parse_args(argv)
    _require("train-draft", "worker")
    argv = with_default_model(argv, is_training=True)
    from worker.training.__main__ import main as training_main

    return training_main(argv)


def with_default_model(argv: list[str], is_training: bool = False) -> list[str]:
    """Complete a worker's flags with the default model, and replace names of models by paths."""
    from fleet.run.models import resolve_model, with_found_draft_model

    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--model")
    if not is_training:
        known.add_argument("--engine", default="torch")
    known.add_argument("-h", "--help", action="store_true")
    given, others = known.parse_known_args(argv)
    engine = "" if is_training else given.engine
    if given.help or (engine == "sim" and given.model is None):
        return argv
    with _progress() as progress:
        path = resolve_model(given.model or environ.get("POINTSMAN_MODEL"), progress)
        if engine == "torch":
            others = with_found_draft_model(others, lambda name: resolve_model(name, progress))
    return [*others, *(["--engine", engine] if engine else []), "--model", str(path)]


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    announced = ""

    def report(name: str, _done: int, total: int) -> None:
        nonlocal announced
        if announced != name:
            announced = name
            print(f"fetching {name} ({total / 1e6:.0f} MB) …", file=sys.stderr)

    if not sys.stderr.isatty():
        yield report  # also without `rich`, which the images of workers do not contain
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def show(name: str, done: int, total: int) -> None:
        nonlocal announced
        if announced != name:
            announced = name
            bar.start()
        bar.update(task, description=name, completed=done, total=total)
        if done >= total and bar.live.is_started:
            bar.stop()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


_ABOUT = "An Envoy endpoint picker for LLM fleets, and the paged-KV worker behind it."
# What an installation lacks if the command cannot be imported.
_EXTRAS = {**dict.fromkeys(("up", "simulate", "fit", "worker"), "sim"), "train-draft": "worker"}
_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "up": _up,
    "restart": _calls("restart", "fleet.run.control", "restart_command", environ, _print_now),
    "ps": _calls("ps", "fleet.commands.parts", "ps_command", environ, print),
    "logs": _calls("logs", "fleet.commands.parts", "logs_command", environ),
    "chat": _chat,
    "models": _models,
    "top": _top,
    "explain": _explain,
    "bench": _bench,
    "plan": _calls("plan", "fleet.commands.capacity_plan", "plan_command", print),
    "simulate": _simulate,
    "fit": _calls("fit", "fleet.sim.fit", "fit_command", print),
    "doctor": _calls("doctor", "fleet.doctor.command", "doctor_command", environ, _print_now),
    "worker": _worker,
    "front": _calls("front", "fleet.proxy.front", "front_command"),
    "sidecar": _calls("sidecar", "fleet.proxy.sidecar", "sidecar_command"),
    "picker": _picker,
    "config": _calls("config", "fleet.commands.config", "config_command", print, _note),
    "files": _calls("files", "fleet.commands.files", "files_command", print),
    "tenants": _calls("tenants", "fleet.commands.tenants", "tenants_command", environ, print),
    "replay": _replay,
    "train-draft": _train_draft,
    "completion": _completion,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
