"""The command lines of `pointsman`, by command. Flags that are not here are in the module
`flags_in`, which is read without the code that runs the command.
"""

import argparse
import os
import shlex
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from base.flags import Dialect, Parser, add_flags

_PATHS = Dialect(readers={"FILE": Path, "RUN": Path, "FOLDER": Path})
_PICKER = """
--picker URL                  the picker's HTTP port; default: of the fleet that runs here, else
                              http://127.0.0.1:9090
"""


class CommandLine(NamedTuple):
    """The line of a command. `about` is for lists, and for `--help` without a `description`."""

    about: str
    flags: str = ""
    description: str = ""
    epilog: str = ""
    dialect: Dialect = Dialect()
    flags_in: str = ""


def parser_of(name: str) -> Parser:
    line = LINES[name]
    if line.flags_in:
        found: Parser = import_module(line.flags_in).build_parser()
        return found
    description = line.description or f"{line.about.capitalize()}."
    parser = Parser(f"pointsman {name}", description, line.epilog or None)
    if name == "config":
        _add_config(parser)
    dialect = line.dialect
    if name == "sidecar":
        # SGLang's own routers read the same variable.
        port = os.environ.get("SGLANG_BOOTSTRAP_PORT", "8998")
        dialect = Dialect(defaults={"bootstrap_port": port})
    add_flags(parser, line.flags, dialect)
    return parser


def _engine(text: str) -> str:
    if text in ("vllm", "sglang", "trtllm", "triton"):
        raise argparse.ArgumentTypeError(
            f"{text} workers are started by themselves, and found by `pointsman picker` "
            "(docs/vllm.md); the engines of `pointsman up` are torch and sim"
        )
    return text


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{str(error).lower()} in {text!r}") from error


def _host(text: str) -> str:
    """Replace `localhost` by its address, because Envoy and the picker take addresses only."""
    return "127.0.0.1" if text == "localhost" else text


def _add_config(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about, flags in _CONFIG:
        add_flags(commands.add_parser(name, help=about), flags, _PATHS if name == "init" else None)


_UP = """
workers
--workers N[1..] = 2          number of workers, at most 256
or --prefill N[1..]           workers that run long prompts for those of --decode, in place of
                              --workers (default: every worker does both)
--decode N[1..]               workers that answer, each behind a sidecar
--engine torch|sim = torch    torch runs a model; sim simulates one, without weights and torch
--model NAME                  name that `pointsman models` lists, GGUF file, Hugging Face directory
                              or id, e.g. ~/models/Qwen3-0.6B (default: the variable
                              POINTSMAN_MODEL, else a small model that is fetched once)
--dtype auto|float32|bfloat16|float16
                              type of weights and activations (default: auto, which is float32 on a
                              CPU)
--devices LIST = all          GPUs for the workers, in turn: all, cpu, or numbers such as 0,2;
                              workers on one GPU share its memory
--worker-args FLAGS           more flags for every `pointsman worker`, in quotes, e.g.
                              '--max-num-seqs 16' (default: none)

Envoy
--host HOST = 127.0.0.1       IP address to listen on, or localhost
--port PORT = 8080            port of Envoy; the other parts use free ports above it
--insecure                    allow a --host that other machines can reach
--routing override-host|original-dst = override-host
                              override-host: Envoy tries a list of workers, and balances by itself
                              without a picker; original-dst: it connects to the given address
--request-body buffered|full-duplex = buffered
                              holder of a body during the decision: Envoy, up to 4 MiB, so that
                              losing the picker costs no request (buffered); or the picker, as the
                              protocol prescribes
--response-bodies off|usage|all = off
                              what the picker sees of responses: headers and the end (off), also the
                              first token's time and the usage, or every piece (all)
--front                       put `pointsman front` before Envoy: streams continue when their
                              workers die
--tenants FILE                serve only the tenants of this file, by API key or JSON web token,
                              with their priorities and limits: docs/tenants.md (default: anyone)
--trust-control-headers       let clients set headers for objective, tenant and latency targets
--envoy-concurrency N[1..] = 1
                              worker threads of Envoy

picker
--config FILE                 EndpointPickerConfig in YAML, e.g. from `pointsman config init`
                              (default: built in)
--allow-experimental-plugins  let --config use alpha plugin types
--objectives FILE             InferenceObjective and InferenceModelRewrite documents (default: none)
--decision-header             return the request's id and the picked worker in response headers
--record FILE                 record every decision in this file, for `pointsman replay` (default:
                              none)
--tracing                     send OpenTelemetry spans of every part, configured by OTEL_* variables

times
--startup-timeout SECONDS[0..] = 120.0
                              time until all parts must be ready
--drain-timeout SECONDS[0..] = 10.0
                              time that requests have to finish after Ctrl-C, or when a part
                              restarts
"""
_FRONT = """
--host TEXT = 127.0.0.1       address to listen on
--port PORT = 8080            port to listen on
--gateway URL = http://127.0.0.1:8081
                              the gateway whose picker chooses workers
--attempts N[1..] = 3         most consecutive workers that may fail with a request without a new
                              token
--patience SECONDS[0..] = 60  time that a request waits while no worker answers
--stall-timeout SECONDS(0..] = 60
                              longest silence of a stream that has begun; then its worker counts as
                              dead
--drain-timeout SECONDS[0..] = 30
                              time that running requests have to finish after SIGTERM
--tracing                     send OpenTelemetry spans, configured by OTEL_* variables
"""
_SIDECAR = """
--host TEXT = 127.0.0.1       address to listen on
--port PORT = 8000            port to listen on
--decoder URL = http://127.0.0.1:8200
                              the decode worker
--data-parallel-size N[1..] = 1
                              number of its data-parallel ranks, which have the ports from
                              --decoder's on; each has one from --port on here
--kv-connector nixlv2|sglang = nixlv2
                              protocol of KV between workers: vLLM's NIXL connector (nixlv2), or
                              SGLang's
--ec-connector ec-nixl|ec-example
                              have images, audio and video encoded by the workers in the header
                              x-encoder-hosts-ports; others fetch the embeddings there (ec-nixl) or
                              from shared storage (ec-example) (default: the header is ignored)
--bootstrap-port PORT         port where SGLang's prefill workers serve rooms: with Pointsman's,
                              their kv_port (default: SGLANG_BOOTSTRAP_PORT, else 8998)
--prefiller-networks CIDR     networks of permitted prefill and encode workers, such as
                              10.8.0.0/16,fd00::/8 (default: all private ones but link-local
                              addresses)
--prefill-timeout SECONDS(0..] = 120
                              longest time of a prefill, after which the decode worker computes the
                              prompt; and of the encode step, after which the request fails
--drain-timeout SECONDS[0..] = 30
                              time that running requests have to finish after SIGTERM
--tracing                     send OpenTelemetry spans, configured by OTEL_* variables
"""
_CONFIGURATION = """
--config-text YAML            the configuration as text
--allow-experimental-plugins  accept alpha plugin types
"""
_CONFIG = (
    (
        "init",
        "write a configuration to edit",
        "[file] FILE                   where to write it, which must not exist (default: print it)",
    ),
    ("schema", "print the JSON Schema of a configuration, for editors", ""),
    (
        "check",
        "report every problem of a file",
        f"""
[file] FILE                   what to check; `-` is standard input
--json                        findings as JSON
--endpoints-file FILE         check this endpoints file instead, with its objectives and rewrites
--objectives FILE             check this file of objectives and rewrites instead, as for `pointsman
                              up`
--pool-name NAME = default    name of the picker's pool, for --endpoints-file
{_CONFIGURATION}""",
    ),
    (
        "show",
        "print the configuration in effect, with all defaults",
        f"""
[file] FILE                   what to show; `-` is standard input (default: the built-in
                              configuration)
--origin                      show the origin of each line
{_CONFIGURATION}""",
    ),
)
LINES: Mapping[str, CommandLine] = {
    "up": CommandLine(
        "run Envoy, a picker and workers on this machine",
        _UP,
        "Run Envoy, a picker and workers on this machine, until Ctrl-C.",
        """\
examples:
  pointsman up                                  two workers with the default model
  pointsman up --engine sim --workers 10        no model, no torch
  pointsman up --prefill 1 --decode 2           prompts and answers on different workers
  pointsman up --config scoring.yaml --record /tmp/decisions.jsonl
  pointsman up --worker-args "--max-num-seqs 16 --max-model-len 2048"
""",
        Dialect(
            readers={"FILE": Path, "FLAGS": _words, "HOST": _host},
            defaults={"worker_args": ()},
            settings={"--engine": {"type": _engine}},
        ),
    ),
    "restart": CommandLine(
        "restart parts of a running fleet without losing requests",
        """
[part] picker|envoy|workers|all = all
                              default: %(default)s, in this order
--port PORT                   port of the fleet's Envoy; required if several fleets run
""",
        "Restart parts of the fleet that `pointsman up` runs here, without a failed "
        "request: one after the other, each once its successor serves.",
    ),
    "ps": CommandLine("list the fleets that run here, and their processes"),
    "logs": CommandLine(
        "show the logs of a running fleet",
        """
[part] PART                   picker, envoy, worker-1 … (default: all)
--lines N[1..] = 20           most lines of each log
--follow                      follow the logs until Ctrl-C
--port PORT                   port of the fleet's Envoy; required if several fleets run
""",
    ),
    "chat": CommandLine(
        "talk to a fleet in the terminal",
        """
[prompt]                      send this and exit; without it: a conversation
--url URL                     default: the fleet that runs here, else http://127.0.0.1:8080
--model NAME                  default: the first one served
--system TEXT                 system prompt
--max-tokens N[1..]           of an answer (default: about 1024)
--temperature NUMBER          0: always the likeliest token (default: the model's)
""",
    ),
    "models": CommandLine(
        "list the models that are known by name, or fetch one",
        """
[action] fetch                download a model, unless it is here already (default: list the models)
[name] NAME                   as `pointsman models` lists it (default: the model of `pointsman up`)
""",
        dialect=Dialect(readers={"action": ("fetch",)}),
    ),
    "top": CommandLine(
        "watch a running picker in the terminal",
        f"""{_PICKER}
--once                        print one snapshot as plain text
""",
    ),
    "explain": CommandLine(
        "show why a request went to its endpoint",
        f"""
[id]                          the request's x-request-id (default: the newest request)
or --last                     the newest request, as without an id
{_PICKER}
--json                        the full record, as JSON
--all                         show every recorded candidate
""",
    ),
    "bench": CommandLine("measure an endpoint under load", flags_in="fleet.bench.flags"),
    "plan": CommandLine(
        "show how many replicas a load needs",
        """
<file> FILE                   capacity, objective and groups
--picker URL                  plan for the load of this picker's pool (its HTTP port)
or --bench FILE               plan for the load of the last stage of a bench (pointsman bench
                              --json)
--rate NUMBER[0..]            requests a second
--input-tokens NUMBER[0..]    tokens of a mean prompt
--output-tokens NUMBER[0..]   tokens of a mean answer
--cached-share SHARE[0..1]    cached share of the prompt's tokens, 0 to 1
--slo BOUNDS                  objective in place of the file's, e.g. ttft_p95<1s,itl_p95<50ms or
                              ttft<1s
--cost-per-replica-hour NUMBER[0..]
                              price in place of the file's
--json                        print one JSON object
""",
        "Show how many replicas a load needs: of each group of workers in FILE, which "
        "is the file of the picker's --autoscale.",
        'example: pointsman plan autoscale.yaml --slo "ttft<2s,itl<60ms" '
        "--rate 4 --input-tokens 3000 --output-tokens 400",
        _PATHS,
    ),
    "simulate": CommandLine(
        "run a fleet in virtual time, with any configuration", flags_in="fleet.sim.flags"
    ),
    "fit": CommandLine(
        "fit a simulated worker to a run of bench",
        """
<run> RUN                     the JSON of the run
<out> FILE                    where the worker is written
--workers N[1..] = 1          number of workers that answered the run
--kv-tokens N[1..]            KV cache of a worker, which no bench can measure
""",
        "Fit a worker of `pointsman simulate` to a run of `pointsman bench --json` of "
        "several rates: prompt tokens a second, the time of a decode step, a fixed time of each "
        "request, and the tokens of a chat template. It schedules a step while the one before it "
        "runs (async_scheduling in the file).",
        dialect=_PATHS,
    ),
    "doctor": CommandLine(
        "find the problems of an installation, and their fixes", flags_in="fleet.doctor.flags"
    ),
    "worker": CommandLine("serve one model over the OpenAI API", flags_in="worker.cli.flags"),
    "front": CommandLine(
        "keep streams whole when their workers die, in front of a gateway",
        _FRONT,
        "Proxy in front of a gateway: when the worker of a stream dies, ask the gateway"
        " for another one, which continues the stream, so that the client sees only one.",
        "example: pointsman front --port 8080 --gateway http://127.0.0.1:8081",
    ),
    "sidecar": CommandLine(
        "have prompts run by prefill workers, in front of a decode worker",
        _SIDECAR,
        "Stand in front of a decode worker: have the prompt of a request run by the"
        " prefill worker that its header x-prefiller-host-port names, then pass it on.",
        "example: pointsman sidecar --port 8000 --decoder http://127.0.0.1:8200",
    ),
    "picker": CommandLine("run an endpoint picker for Envoy", flags_in="picker.cli.flags"),
    "config": CommandLine(
        "write, check or show a picker's configuration",
        description="Work on an EndpointPickerConfig without starting a picker.",
    ),
    "files": CommandLine(
        "write Envoy bootstraps, systemd units, alerts and dashboards to a folder",
        """
[names …] NAME                a file, or a folder of them, as `pointsman files` lists it (default:
                              list them)
--into FOLDER = .             folder to write to (default: this one)
""",
        dialect=_PATHS,
    ),
    "tenants": CommandLine(
        "check a file of tenants, or add them to an Envoy bootstrap",
        """
<file> FILE                   the tenants, see docs/tenants.md
--bootstrap FILE              the bootstrap to add them to, e.g. from `pointsman files envoy`
--into FILE                   file to write the result to, with the keys, for its owner only
                              (default: print it)
""",
        "Check a file of tenants. With --bootstrap, write that bootstrap with authentication,"
        " identity and limits in front of the picker.",
        dialect=_PATHS,
    ),
    "replay": CommandLine(
        "repeat recorded decisions, also with another configuration",
        """
<file> FILE                   the recording
--config NEW                  repeat the decisions with this configuration, and report what changes
--json                        print one JSON object
--limit N[0..] = 10           rows and differences to list at most
--allow-experimental-plugins  allow alpha plugin types in --config; always on if they were allowed
                              for the recording
""",
        "Decide the requests of a recording (picker --record) again, with the picker's "
        "own code. Without --config every decision has to be what it was.",
        dialect=Dialect(
            readers={"FILE": Path, "NEW": Path},
            fields={"--allow-experimental-plugins": "experimental"},
        ),
    ),
    "train-draft": CommandLine("train a draft head for a model", flags_in="worker.training.flags"),
    "completion": CommandLine(
        "print a script that completes commands and flags in a shell",
        "<shell> bash|zsh|fish         the shell",
        epilog="example: pointsman completion bash > "
        "~/.local/share/bash-completion/completions/pointsman",
    ),
    "version": CommandLine("print the version"),
}
