# Apart: read for help and completion, without what `up` imports.
"""The flags of `pointsman up`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fleet.command_line import Parser, count, port, seconds

_ABOUT = "Run Envoy, a picker and workers on this machine, until Ctrl-C."
_EXAMPLES = """\
examples:
  pointsman up                                  two workers with the default model
  pointsman up --engine sim --workers 10        no model, no torch
  pointsman up --config scoring.yaml --record /tmp/decisions.jsonl
  pointsman up --worker-args "--max-num-seqs 16 --max-model-len 2048"
"""


def build_parser() -> Parser:
    """All of them, in groups."""
    parser = Parser(prog="pointsman up", description=_ABOUT, epilog=_EXAMPLES)
    _add_workers(parser.add_argument_group("workers"))
    _add_envoy(parser.add_argument_group("Envoy"))
    _add_picker(parser.add_argument_group("picker"))
    add = parser.add_argument_group("times").add_argument
    text = "how long all parts may take to be ready"
    add("--startup-timeout", type=seconds, default=120.0, metavar="SECONDS", help=text)
    text = "how long running requests may take after Ctrl-C"
    add("--drain-timeout", type=seconds, default=10.0, metavar="SECONDS", help=text)
    return parser


def _add_workers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workers", type=count, default=2, metavar="N", help="how many")
    text = "torch runs a model; sim answers at its pace, without model or torch"
    add("--engine", choices=("torch", "sim"), default="torch", help=text)
    text = (
        "name that `pointsman models` lists, GGUF file, Hugging Face directory or id, e.g. "
        "~/models/Qwen3-0.6B (default: the variable POINTSMAN_MODEL, else a small model that is "
        "fetched once)"
    )
    add("--model", metavar="NAME", help=text)
    text = "of weights and activations (default: auto, float32 on a CPU)"
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help=text)
    text = (
        "GPUs to put workers on, in turn: all, cpu, or numbers such as 0,2; those on one GPU share "
        "its memory by equal parts"
    )
    add("--devices", default="all", metavar="LIST", help=text)
    text = (
        "more flags of `pointsman worker` for every worker, in quotes, e.g. '--max-num-seqs 16' "
        "(default: none)"
    )
    add("--worker-args", type=_words, default=(), metavar="FLAGS", help=text)


def _add_envoy(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "IP address to listen on, or localhost"
    add("--host", type=_host, default="127.0.0.1", help=text)
    text = "port to listen on; the other parts take free ports behind it"
    add("--port", type=port, default=8080, help=text)
    add("--insecure", action="store_true", help="allow a --host that others can reach")
    text = (
        "how the picker's choice is followed: override-host walks a list of workers and serves "
        "without a picker; original-dst connects to the address it is given"
    )
    add("--routing", choices=("override-host", "original-dst"), default="override-host", help=text)
    text = "buffered: Envoy holds each body, and losing the picker costs no request"
    add("--request-body", choices=("buffered", "full-duplex"), default="buffered", help=text)
    text = "let clients say which objective and which tenant a request is of"
    add("--trust-control-headers", action="store_true", help=text)
    add("--envoy-concurrency", type=count, default=1, metavar="N", help="threads")


def _add_picker(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "EndpointPickerConfig in YAML, e.g. from `pointsman config init` (default: built in)"
    add("--config", type=Path, metavar="FILE", help=text)
    text = "let --config name plugins whose parameters may still change"
    add("--allow-experimental-plugins", action="store_true", help=text)
    text = "InferenceObjective and InferenceModelRewrite documents, in YAML (default: none)"
    add("--objectives", type=Path, metavar="FILE", help=text)
    text = "report the request's id and the picked worker in response headers"
    add("--decision-header", action="store_true", help=text)
    text = "write every decision of the picker to this file, for `pointsman replay` (default: none)"
    add("--record", type=Path, metavar="FILE", help=text)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{str(error).lower()} in {text!r}") from error


def _host(text: str) -> str:
    """Envoy and the picker take addresses."""
    return "127.0.0.1" if text == "localhost" else text
