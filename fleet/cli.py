"""The `pointsman` command. A subcommand's room is imported only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.broken_pipe import status_of
from fleet.errors import FleetError

if TYPE_CHECKING:
    from fleet.models import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status. What the user can act on is one line on stderr
    and status 1; output that is not read to its end is status 141.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return status_of(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        # These have their own flags, in the spelling of the systems they stand in for.
        if arguments and arguments[0] in _PASSED_ON:
            return _PASSED_ON[arguments[0]](arguments[1:])
        options = build_parser().parse_args(arguments)
        return _OWN[options.command](options)
    except FleetError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The flags of every subcommand but those of `_PASSED_ON`, which have their own."""
    parser = argparse.ArgumentParser(
        prog="pointsman",
        description="An Envoy endpoint picker for LLM fleets, and the paged-KV worker behind it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _HELP.items():
        command = commands.add_parser(name, help=text)
        if name in _FLAGS:
            _FLAGS[name](command)
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument(
        "--engine",
        choices=("torch", "sim"),
        default="torch",
        help="sim needs neither model nor torch",
    )
    parser.add_argument("--model", metavar="NAME", help="GGUF file, Hugging Face directory or id")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--host", default="127.0.0.1", help="where Envoy listens")
    parser.add_argument("--port", type=int, default=8080, help="of Envoy; the others are near it")
    parser.add_argument("--insecure", action="store_true", help="allow a --host others can reach")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the picker's configuration")
    text = "InferenceObjective and InferenceModelRewrite documents, in YAML"
    parser.add_argument("--objectives", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--routing", choices=("override-host", "original-dst"), default="override-host"
    )
    parser.add_argument(
        "--request-body",
        choices=("buffered", "full-duplex"),
        default="buffered",
        help="buffered: Envoy keeps each body, and losing the picker costs no request",
    )
    parser.add_argument(
        "--trust-control-headers",
        action="store_true",
        help="let clients say which objective and which tenant a request is of",
    )
    text = "let --config name plugins whose parameters may still change"
    parser.add_argument("--allow-experimental-plugins", action="store_true", help=text)
    text = "tell clients the request's id and the worker that was picked, in response headers"
    parser.add_argument("--decision-header", action="store_true", help=text)
    text = "write down every decision of the picker, for `pointsman replay`"
    parser.add_argument("--record", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--worker-args", default="", metavar="FLAGS", help="more flags for every worker, in quotes"
    )
    parser.add_argument(
        "--devices",
        default="all",
        metavar="LIST",
        help="GPUs to put workers on, in turn: all (default), cpu, or numbers such as 0,2; those "
        "on one GPU share its memory by equal parts",
    )
    parser.add_argument("--envoy-concurrency", type=int, default=1, help="Envoy's threads")
    parser.add_argument("--startup-timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long running requests may take after Ctrl-C",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="ask this and leave; else: a conversation")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="default %(default)s")
    parser.add_argument("--model", help="default: the first one served")
    parser.add_argument("--system", help="instructions before the conversation")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float, help="0: always the likeliest word")


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_picker(parser)
    parser.add_argument("--once", action="store_true", help="print one picture as plain text")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("id", nargs="?", help="the request's x-request-id")
    wanted.add_argument("--last", action="store_true", help="the request that came last")
    _add_picker(parser)
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")
    parser.add_argument("--all", action="store_true", help="show every candidate that is kept")


def _add_picker(parser: argparse.ArgumentParser) -> None:
    text = (
        "the picker's HTTP port; default: of the fleet that runs here, else http://127.0.0.1:9090"
    )
    parser.add_argument("--picker", metavar="URL", help=text)


def _up(arguments: argparse.Namespace) -> int:
    from fleet.envoy.settings import Mechanism
    from fleet.plan import FleetOptions
    from fleet.up import read_objectives, up

    def say(line: str) -> None:
        print(line, flush=True)

    given = vars(arguments)
    del given["command"]
    path, trust = given["objectives"], arguments.trust_control_headers
    given |= {
        "objectives": "" if path is None else read_objectives(path, say, clients_may_name=trust),
        "routing": Mechanism(arguments.routing),
        "buffer_request_body": given.pop("request_body") == "buffered",
        "worker_args": tuple(shlex.split(arguments.worker_args)),
        "startup_seconds": given.pop("startup_timeout"),
        "drain_seconds": given.pop("drain_timeout"),
    }
    options = FleetOptions(**given)
    with _progress() as progress:
        return up(options, say, progress)


def _chat(arguments: argparse.Namespace) -> int:
    from fleet.chat import ChatOptions, chat

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history in input())
    given = vars(arguments)
    del given["command"]
    return chat(ChatOptions(**given), lambda text: print(text, end="", flush=True), input)


def _top(arguments: argparse.Namespace) -> int:
    from os import environ

    from fleet.running_picker import picker_url
    from fleet.top import console_and_keyboard, top

    url = picker_url(arguments.picker, environ)
    return top(url, *console_and_keyboard(), once=arguments.once)


def _explain(arguments: argparse.Namespace) -> int:
    from os import environ

    from rich.console import Console

    from fleet.explain import Options, explain
    from fleet.running_picker import picker_url, which_of_several

    url = picker_url(arguments.picker, environ)
    note = which_of_several(arguments.picker, environ)
    if note is not None:
        print(note, file=sys.stderr)
    return explain(Options(url, arguments.id, arguments.json, arguments.all), Console())


def _version(_: argparse.Namespace) -> int:
    print(f"pointsman {version('pointsman')}")
    return 0


def _worker(argv: list[str]) -> int:
    argv = with_default_model(argv)
    from worker.__main__ import main as worker_main

    return worker_main(argv)


def _picker(argv: list[str]) -> int:
    from picker.__main__ import main as picker_main

    return picker_main(argv)


def _config(argv: list[str]) -> int:
    from fleet.config_command import config_command

    return config_command(argv, print, lambda line: print(line, file=sys.stderr))


def _replay(argv: list[str]) -> int:
    from rich.console import Console

    from fleet.replay import replay_command

    return replay_command(argv, Console(), lambda line: print(line, file=sys.stderr))


def _restart(argv: list[str]) -> int:
    from os import environ

    from fleet.control import restart_command

    return restart_command(argv, environ, lambda line: print(line, flush=True))


def _doctor(argv: list[str]) -> int:
    from os import environ

    from fleet.doctor.command import doctor_command

    return doctor_command(argv, environ, lambda line: print(line, flush=True))


def _train_draft(argv: list[str]) -> int:
    argv = with_default_model(argv, is_training=True)
    from worker.training.__main__ import main as training_main

    return training_main(argv)


def with_default_model(argv: list[str], is_training: bool = False) -> list[str]:
    """The flags of a worker, or of a training, completed: without a model the default one, fetched
    if need be; names instead of paths are resolved, also of a model that drafts for a worker's.
    """
    from os import environ

    from fleet.models import resolve_model, with_found_draft_model

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
    """Show a download: a bar in a terminal, one line elsewhere; nothing while there is none."""
    announced = False

    def tell(_done: int, total: int) -> None:
        nonlocal announced
        if not announced:
            announced = True
            print(f"fetching the default model ({total / 1e6:.0f} MB) …", file=sys.stderr)

    if not sys.stderr.isatty():
        yield tell  # also where `rich` is not installed: in the images of workers
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("fetching the default model"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("download", total=None)

    def show(done: int, total: int) -> None:
        nonlocal announced
        if not announced:
            announced = True
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total and bar.live.is_started:
            bar.stop()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


_HELP = {
    "up": "run Envoy, a picker and workers on this machine",
    "restart": "restart parts of a running fleet, at no request's cost",
    "chat": "talk to a fleet in the terminal",
    "worker": "serve one model (see `pointsman worker --help`)",
    "picker": "pick endpoints for Envoy (see `pointsman picker --help`)",
    "train-draft": "train a draft head for a model (see `pointsman train-draft --help`)",
    "config": "check a picker's configuration (see `pointsman config --help`)",
    "replay": "decide recorded requests again (see `pointsman replay --help`)",
    "top": "watch a running picker in the terminal",
    "explain": "say why a request went where it went",
    "doctor": "say what is wrong with an installation, and how to mend it",
    "version": "print the version",
}
_FLAGS = {"up": _add_up, "chat": _add_chat, "top": _add_top, "explain": _add_explain}
_OWN: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "chat": _chat,
    "top": _top,
    "explain": _explain,
    "version": _version,
}
_PASSED_ON: dict[str, Callable[[list[str]], int]] = {
    "worker": _worker,
    "picker": _picker,
    "train-draft": _train_draft,
    "config": _config,
    "replay": _replay,
    "restart": _restart,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
