"""The command line of `pointsman up`."""

import argparse
import shlex
from pathlib import Path

from base.flags import Dialect, Parser, add_flags

_ABOUT = "Run Envoy, a picker and workers on this machine, until Ctrl-C."
_EXAMPLES = """\
examples:
  pointsman up                                  two workers with the default model
  pointsman up --engine sim --workers 10        no model, no torch
  pointsman up --prefill 1 --decode 2           prompts and answers on different workers
  pointsman up --config scoring.yaml --record /tmp/decisions.jsonl
  pointsman up --worker-args "--max-num-seqs 16 --max-model-len 2048"
"""


_FLAGS = """
workers
--workers N[1..] = 2          number of workers, at most 256
or --prefill N[1..]           in place of --workers: number of workers that run long prompts for
                              those of --decode, and transfer the KV (default: every worker does
                              both)
--decode N[1..]               in place of --workers: number of workers that answer, each behind a
                              sidecar
--engine torch|sim = torch    torch runs a model; sim simulates one, without weights and torch
--model NAME                  name that `pointsman models` lists, GGUF file, Hugging Face directory
                              or id, e.g. ~/models/Qwen3-0.6B (default: the variable
                              POINTSMAN_MODEL, else a small model that is fetched once)
--dtype auto|float32|bfloat16|float16
                              type of weights and activations (default: auto, which is float32 on a
                              CPU)
--devices LIST = all          GPUs for the workers, in turn: all, cpu, or numbers such as 0,2;
                              workers on one GPU share its memory equally
--worker-args FLAGS           more flags of `pointsman worker` for every worker, in quotes, e.g.
                              '--max-num-seqs 16' (default: none)

Envoy
--host HOST = 127.0.0.1       IP address to listen on, or localhost
--port PORT = 8080            port of Envoy; the other parts use free ports above it
--insecure                    allow a --host that other machines can reach
--routing override-host|original-dst = override-host
                              routing in Envoy: override-host tries a list of workers, and balances
                              by itself without a picker; original-dst connects to the given address
--request-body buffered|full-duplex = buffered
                              holder of a body during the decision: Envoy, up to 4 MiB, so that
                              losing the picker costs no request (buffered); or the picker, as the
                              protocol prescribes (full-duplex)
--front                       put `pointsman front` before Envoy: streams continue when their
                              workers die
--trust-control-headers       let clients set the headers for objective, tenant and latency targets
--envoy-concurrency N[1..] = 1
                              worker threads of Envoy

picker
--config FILE                 EndpointPickerConfig in YAML, e.g. from `pointsman config init`
                              (default: built in)
--allow-experimental-plugins  let --config use alpha plugin types
--objectives FILE             InferenceObjective and InferenceModelRewrite documents, in YAML
                              (default: none)
--decision-header             return the request's id and the picked worker in response headers
--record FILE                 record every decision in this file, for `pointsman replay` (default:
                              none)

times
--startup-timeout SECONDS[0..] = 120.0
                              time until all parts must be ready
--drain-timeout SECONDS[0..] = 10.0
                              time that running requests have to finish after Ctrl-C, or when a part
                              restarts
"""


def build_parser() -> Parser:
    parser = Parser(prog="pointsman up", description=_ABOUT, epilog=_EXAMPLES)
    dialect = Dialect(
        readers={"FILE": Path, "FLAGS": _words, "HOST": _host},
        defaults={"worker_args": ()},
        settings={"--engine": {"type": _engine}},
    )
    add_flags(parser, _FLAGS, dialect)
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
    """Envoy and the picker take addresses."""
    return "127.0.0.1" if text == "localhost" else text
