"""The `pointsman` command."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.command_lines import parser_of
from fleet.commands.cli import main, with_default_model
from fleet.extras import require_extra


@pytest.mark.parametrize("argv", [["version"], ["--version"], ["-V"]])
def test_the_version_is_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("pointsman 0.")


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_without_a_command_there_is_help(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("up", "chat", "top", "explain", "doctor"))


# What is wrong | the command line, in which `sim` is `up --engine sim` | a part of the sentence
WRONG = """
an unknown command | upp | there is no command upp; did you mean up?
a flag instead of a command | --port 1 | there is no command --port
an unknown flag | up --prot 3 | --prot 3; did you mean --port?
an abbreviation | up --work 3 | unrecognized arguments: --work 3
a word too many | up now | unrecognized arguments: now
a port beyond the last | sim --port 99999 | --port: takes a whole number from
a worker's port beyond the last | worker --port 99999 | takes a whole number from 0 to 65535
port 0 | sim --port 0 | from 1 to 65535, not '0'
a port that is a word | sim --port http | from 1 to 65535, not 'http'
no room behind the port | sim --port 65535 | --port 65535 leaves no room
no workers | sim --workers 0 | --workers: takes a whole number of 1 or more
too many of both | sim --prefill 256 --decode 1
      | --prefill and --decode together are between 1 and 256, not 257
too many workers | sim --workers 10000 | --workers is between 1 and 256, not 10000
half a worker | sim --workers 1.5 | --workers: takes a whole number of 1 or more
no threads | sim --envoy-concurrency 0 | --envoy-concurrency: takes a whole number
an unknown engine | up --engine simm | 'sim'); did you mean sim? (see pointsman
another project's engine | up --engine sglang
      | --engine: sglang workers are started by themselves, and found by `pointsman picker`
a host by name | sim --host example.org | --host takes an IP address
an open host | sim --host 0.0.0.0 | --host 0.0.0.0 can be reached from other
a time before now | sim --drain-timeout -5 | --drain-timeout: takes a number of 0 or
no time | sim --startup-timeout soon | --startup-timeout: takes a number
endless time | sim --startup-timeout inf | --startup-timeout: takes a number
an open quotation | sim --worker-args "'" | --worker-args: no closing quotation
an unknown flag of workers | sim --worker-args '--bogus 3'
      | pointsman up: --worker-args: unrecognized arguments: --bogus 3
one that is misspelt | sim --worker-args '--max-num-seq 3'
      | --max-num-seq 3; did you mean --max-num-seqs?
a wrong value for workers | sim --worker-args '--max-num-seqs many'
      | --worker-args: argument --max-num-seqs: takes a whole number of 1 or more
JSON cut off | sim --worker-args '--kv-events-config {{'
      | --worker-args: --kv-events-config: not a JSON object
what up decides | sim --worker-args --port=3 | --worker-args cannot have --port
help of workers | sim --worker-args --help | whose --help has them
no configuration | sim --config /no/such | no configuration file at /no/such
a broken configuration | sim --config {tmp}/broken.yaml | broken.yaml:2:1: not valid YAML
objectives that are not there | sim --objectives /no/such | --objectives: cannot
a recording nowhere | sim --record /nodir/x | /nodir/x: there is no folder
a recording that is a folder | sim --record {tmp} | --record takes a file
picker: an unknown flag | picker --grpc-prt 1 | did you mean --grpc-port?
picker: flags at odds | picker --endpoints-file x --pool a
      | --endpoints-file is for a picker of one pool
worker: an unknown flag | worker --prot 1 | did you mean --port?
worker: a wrong value | worker --block-size 3 | must be a power of two, got 3
restart: an unknown part | restart enovy
      | 'enovy' (choose from 'picker', 'envoy', 'workers', 'all')
config: an unknown command | config chekc | ; did you mean check? (see pointsman
models: an unknown action | models ftech | ; did you mean fetch? (see pointsman
completion: an unlike shell | completion cmd | 'fish') (see pointsman
config: no command | config | the following arguments are required: COMMAND
config: an unknown flag | config check --jsn f | unrecognized arguments: --jsn
files: an unknown name | files envoy/esd.yaml
      | no file envoy/esd.yaml; did you mean envoy/eds.yaml?
config: nothing to check | config check | there is nothing to check
explain: two asked | explain --last x | not allowed with argument --last
doctor: an unknown check | doctor --only all | invalid choice: 'all'
replay: no recording | replay | the following arguments are required: FILE
chat: an address that is none | chat --url :: | --url: takes an address such as
top: a name too long | top --picker {long} | --picker: takes an address such as
front: more than an address | front --gateway x:1/a?b=c | --gateway: takes an address such as
front: streams that may never be silent | front --stall-timeout 0
      | --stall-timeout: takes a number above 0, not
sidecar: no time for a prompt | sidecar --prefill-timeout 0
      | --prefill-timeout: takes a number above 0, not
replay: a byte no name has | replay a\0 | 'a\\x00' is no value of a flag
chat: a wrong number | chat --max-tokens few | --max-tokens:
bench: no rate | bench --rate 0 | --rate: takes requests a second such as 5
bench: two loops | bench --rate 1 --concurrency 2 | not allowed with
bench: lengths upside down | bench --input-tokens 9..3
      | --input-tokens: takes a whole number from 1 to 9,999,999, or two such as 128..1024
bench: no objective | bench --slo ttft<1 | --slo: takes bounds such as ttft<1s
bench: a share beyond all | bench --slo-share 99 | takes a number from 0 to 1
bench: no shape | bench --burstiness 0 | takes a number of 0.01 or more, or inf
bench: no time | bench --duration 0 | --duration: takes a number above 0
bench: a header of ours | bench --header 'host: x' | --header: takes 'name: value'
bench: speed of nothing | bench --speed 2 | --speed is for a --trace
bench: prompts of no group | bench --prefix-prompts 9 | needs --prefix-groups
bench: all of it warm-up | bench --warmup 30 --duration 30
      | --warmup must be shorter than --duration
bench: all of the usual time warm-up | bench --warmup 30
      | --warmup must be shorter than --duration, 30 s
bench: too many tokens | bench --input-tokens 10000000 | from 1 to 9,999,999
bench: too many requests | bench --rate 1e7 | at most a million
bench: rounds of nothing | bench --rounds 3 | --rounds is for --compare
bench: pauses of nothing | bench --think 3 | give --turns 2 or more
bench: gaps of nothing | bench --concurrency 3 --burstiness 2 | --burstiness is for --rate
bench: two results in a file | bench --json {tmp}/a --html {tmp}/a
      | two of --json, --csv and --html name
bench: a result in no folder | bench --csv {tmp}/broken.yaml/a | broken.yaml is no folder
simulate: a result in no folder | simulate --json {tmp}/broken.yaml/a/b | broken.yaml is no folder
plan: no file | plan /no/such | cannot read /no/such: No such file
bench: stages to compare | bench --compare-url x:1 --rate 1,2 | a comparison has one stage
bench: two comparisons | bench --compare-url x:1 --compare a b
      | argument --compare: not allowed with argument --compare-url
bench: no configuration | bench --compare /no/a b | --compare: /no/a is neither a file
bench: a picker for nothing | bench --picker x:1 | --picker is for --compare
bench: no trace | bench --trace /no/such | --trace: /no/such: No such file
bench: no such trace | bench --trace {tmp}/broken.yaml | is not a known trace
bench: a result that is a folder | bench --json {tmp} | the name of a file
train-draft: a wrong number | train-draft --steps 0 | takes a whole number of 1 or more
"""
_started: list[str] = []


def _note_starts(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"):
        _started.append(f"{event} {arguments}")


sys.addaudithook(_note_starts)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param(line, reason, id=name)
        for name, line, reason in re.findall(r"^(.+?) \| (.+?)\s+\| (.+)$", WRONG, re.MULTILINE)
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(
    line: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.yaml").write_text("kind: [")
    line = re.sub("^sim ", "up --engine sim ", line)
    _started.clear()
    try:
        status = main(shlex.split(line.format(tmp=tmp_path, long="a" * 99)))
    except SystemExit as error:
        status = error.code
    out, error = capsys.readouterr()
    assert (status, out, _started) == (2, "", [])
    assert error.startswith("pointsman")
    assert error.count("\n") == 1
    assert reason in error


def test_explain_means_the_newest_request_unless_one_is_named() -> None:
    parse = parser_of("explain").parse_args
    assert parse([]).id is parse(["--last"]).id is None
    assert parse(["c4f8"]).id == "c4f8"


def test_a_busy_port_is_one_sentence_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if port > 65_000:
            pytest.skip("the kernel gave one of the last ports")
        assert main(["up", "--engine", "sim", "--host", "localhost", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"pointsman: port {port} on 127.0.0.1 is busy")
    assert error.count("\n") == 1


@pytest.mark.parametrize("extra", ["worker", "sim", "fleet"])
def test_installed_extras_are_complete(extra: str) -> None:
    require_extra("pointsman", extra)


def test_a_worker_gets_the_model_it_was_asked_to_serve(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    completed = with_default_model(["--port", "1", f"--model={model}", "--dtype", "float32"])
    assert completed == [
        *("--port", "1", "--dtype", "float32"),
        *("--engine", "torch", "--model", str(model)),
    ]


@pytest.mark.parametrize("argv", [["--engine", "sim"], ["--help"], ["--engine=sim", "--port", "1"]])
def test_a_command_without_a_model_downloads_none(argv: list[str]) -> None:
    assert with_default_model(argv) == argv


WITHOUT = """
import sys
shelf, *arguments = sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == shelf:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from fleet.commands.cli import main
sys.exit(main(arguments))
"""


@pytest.mark.parametrize(
    ("shelf", "command"),
    [
        ("picker.planner", ["plan", "file"]),
        ("worker.sim", ["simulate"]),
        ("worker.training", ["train-draft", "--model", "missing.gguf"]),
    ],
)
def test_the_command_names_the_missing_shelf(shelf: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, shelf, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"pointsman: {command[0]} needs {shelf}, which is not installed\n"


ON_WINDOWS = """
import asyncio, subprocess, sys
for name in ("fcntl", "resource", "termios", "tty", "uvloop"):
    sys.modules[name] = None
from fleet.commands.cli import main
sys.platform = "win32"
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["picker", "top"])
def test_a_command_that_windows_cannot_run_names_wsl(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_WINDOWS, command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"pointsman: {command} needs Linux: use WSL2 or a container\n"


ON_A_MAC = """
import ctypes, importlib, os, pkgutil, sys, types
del os.sched_getaffinity, os.memfd_create
sys.platform = "darwin"
nothing = types.SimpleNamespace(_get_proxy_settings=dict, _get_proxies=dict)
sys.modules["_scproxy"] = nothing  # what urllib imports there
ctypes.CDLL = lambda *_, **__: nothing
import base, fleet, picker
for root in (base, picker, fleet):
    for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        importlib.import_module(module.name)
from fleet.run.proc import cores
from picker.app.memory import keep_freed_pages
from picker.file_changes import _open_watch
print(cores() == os.cpu_count(), keep_freed_pages({}))
try:
    _open_watch("/")
except OSError as error:
    print(error)
"""


@pytest.mark.full
def test_picker_and_commands_need_nothing_that_only_linux_has() -> None:
    argv = (sys.executable, "-c", ON_A_MAC)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True False\nthis system has no inotify\n", "")
