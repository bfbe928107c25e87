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
  pointsman up --prefill 1 --decode 2           prompts and answers on different workers
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
    text = "how long all parts get to become ready"
    add("--startup-timeout", type=seconds, default=120.0, metavar="SECONDS", help=text)
    text = "how long running requests get to finish after Ctrl-C, or when a part restarts"
    add("--drain-timeout", type=seconds, default=10.0, metavar="SECONDS", help=text)
    return parser


def _add_workers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    either = group.add_mutually_exclusive_group().add_argument
    either("--workers", type=count, default=2, metavar="N", help="number of workers, at most 256")
    text = (
        "in place of --workers: so many workers that run long prompts for those of --decode, and"
        " hand the KV over (default: every worker does both)"
    )
    either("--prefill", type=count, metavar="N", help=text)
    text = "in place of --workers: so many workers that answer, each behind a sidecar"
    add("--decode", type=count, metavar="N", help=text)
    text = "torch runs a model; sim simulates one, without weights and torch"
    add("--engine", type=_engine, choices=("torch", "sim"), default="torch", help=text)
    text = (
        "name that `pointsman models` lists, GGUF file, Hugging Face directory or id, e.g. "
        "~/models/Qwen3-0.6B (default: the variable POINTSMAN_MODEL, else a small model that is "
        "fetched once)"
    )
    add("--model", metavar="NAME", help=text)
    text = "type of weights and activations (default: auto, which is float32 on a CPU)"
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help=text)
    text = (
        "GPUs for the workers, in turn: all, cpu, or numbers such as 0,2; workers on one GPU get "
        "equal parts of its memory"
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
    text = "port of Envoy; the other parts use free ports above it"
    add("--port", type=port, default=8080, help=text)
    add("--insecure", action="store_true", help="allow a --host that other machines can reach")
    text = (
        "how Envoy follows the picker: override-host tries a list of workers, and balances by "
        "itself without a picker; original-dst connects to the given address"
    )
    add("--routing", choices=("override-host", "original-dst"), default="override-host", help=text)
    text = (
        "which process holds a body during the decision: Envoy, up to 4 MiB, so that losing the "
        "picker costs no request; or the picker, as the protocol prescribes"
    )
    add("--request-body", choices=("buffered", "full-duplex"), default="buffered", help=text)
    text = "put `pointsman front` before Envoy: streams go on when their workers die"
    add("--front", action="store_true", help=text)
    text = "let clients set the headers for objective, tenant and latency targets"
    add("--trust-control-headers", action="store_true", help=text)
    add("--envoy-concurrency", type=count, default=1, metavar="N", help="worker threads of Envoy")


def _add_picker(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "EndpointPickerConfig in YAML, e.g. from `pointsman config init` (default: built in)"
    add("--config", type=Path, metavar="FILE", help=text)
    text = "let --config use alpha plugin types"
    add("--allow-experimental-plugins", action="store_true", help=text)
    text = "InferenceObjective and InferenceModelRewrite documents, in YAML (default: none)"
    add("--objectives", type=Path, metavar="FILE", help=text)
    text = "return the request's id and the picked worker in response headers"
    add("--decision-header", action="store_true", help=text)
    text = "record every decision in this file, for `pointsman replay` (default: none)"
    add("--record", type=Path, metavar="FILE", help=text)


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
        raise argparse.ArgumentTypeError(f"{str(error).lower()} in {text!r}") from error


def _host(text: str) -> str:
    """Envoy and the picker take addresses."""
    return "127.0.0.1" if text == "localhost" else text
