"""The HTTP front end's part of the worker's command line."""

from __future__ import annotations

import argparse
import random
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from worker.api.schema.params import ModelLimits, SamplingContext, sampling_params
from worker.api.schema.requests import SamplingFields
from worker.api.tools.answer import REASONING_FORMATS, TOOL_FORMATS
from worker.catalog import catalog_sampling
from worker.config import ApiConfig, PoolerConfig, TlsConfig
from worker.errors import ConfigError, RequestError
from worker.executor.sim.tokens import HIDDEN_SIZE
from worker.flag_types import (
    Flag,
    add_flags,
    at_least,
    byte_count,
    configured,
    json_texts,
    not_negative,
    port,
    positive,
)
from worker.tokenizer import sim
from worker.tokenizer.checkpoint import Checkpoint

SIM_MODEL_NAME = "sim"
MAX_BODY_BYTES_LIMIT = 64 << 20
# Names of a checkpoint's generation_config.json → request fields whose defaults they set.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}

# Without where to listen: `add_server_flags` has that.
_SERVER = (
    Flag("--uds", str, "path of a unix socket to listen on instead of a port"),
    Flag("--ssl-certfile", str, "certificate chain (PEM); serves HTTPS"),
    Flag("--ssl-keyfile", str, "its private key (PEM)"),
    Flag(
        "--allowed-origins",
        json_texts,
        'origins whose web pages may send requests (CORS); [] for none (default ["*"])',
        metavar="JSON",
    ),
    Flag("--allow-credentials", bool, "let these pages send cookies and other credentials"),
    Flag(
        "--allowed-methods", json_texts, 'their requests\' methods (default ["*"])', metavar="JSON"
    ),
    Flag(
        "--allowed-headers", json_texts, 'their requests\' headers (default ["*"])', metavar="JSON"
    ),
    Flag("--ssl-ca-certs", str, "CAs (PEM) that must have signed clients' own"),
    Flag(
        "--max-num-queued-reqs",
        at_least(0),
        "answer 503 while this many sequences wait (default: no limit)",
    ),
    Flag(
        "--max-num-queued-tokens",
        at_least(0),
        "answer 503 while this many prompt tokens wait (default: no limit)",
    ),
    Flag("--max-body-bytes", byte_count, "longest request body, 64M at most (default %(default)s)"),
    Flag(
        "--max-rss-bytes",
        byte_count,
        "answer 503 while the HTTP process uses more memory than this (default: no limit)",
    ),
    Flag(
        "--max-connections",
        at_least(1),
        "most connections; further ones get a 503 (default: what the file limit allows)",
    ),
    Flag(
        "--header-timeout",
        positive,
        "seconds from a request's first byte to the end of its headers (default %(default)s)",
        "header_timeout_seconds",
    ),
    Flag(
        "--body-timeout",
        positive,
        "seconds from the end of the headers to the end of the body (default %(default)s)",
        "body_timeout_seconds",
    ),
    Flag(
        "--write-stall-timeout",
        positive,
        "drop a client that does not read its answer for this many seconds (default %(default)s)",
        "write_stall_seconds",
    ),
    Flag(
        "--sse-keep-alive-interval",
        not_negative,
        "send a comment on a silent stream every so many seconds; 0: never",
    ),
    Flag(
        "--stream-interval",
        at_least(1),
        "tokens in one frame of a stream (default %(default)s)",
    ),
    Flag(
        "--shutdown-timeout",
        not_negative,
        "seconds that running requests get to finish after SIGTERM (default %(default)s)",
        "shutdown_timeout_seconds",
    ),
    Flag("--strict-fields", bool, "refuse requests with unknown fields instead of ignoring these"),
    Flag("--enable-request-id-headers", bool, "return X-Request-Id in every response"),
    Flag("--enable-prompt-tokens-details", bool, "report cached prompt tokens in usage"),
    Flag("--enable-force-include-usage", bool, "report usage in every stream"),
    Flag("--return-tokens-as-token-ids", bool, 'write tokens of log probabilities as "token_id:N"'),
    Flag("--enable-per-request-metrics", bool, "report timings in each response"),
    Flag(
        "--enable-admin-routes",
        bool,
        "serve the routes that change or show the whole worker: sleep, pause, reset, server info",
    ),
    Flag(
        "--enable-tokenizer-info-endpoint",
        bool,
        "serve GET /tokenizer_info",
        "enable_tokenizer_info",
    ),
)
# What a request is answered like when it does not say.
MODEL_FLAGS = (
    Flag(
        "--chat-template",
        str,
        "a Jinja file, or the template itself in one line (default: the model's)",
    ),
    Flag(
        "--generation-config",
        str,
        "default sampling parameters: auto takes them from the model's generation_config.json, or"
        " from the catalogue (`pointsman models`), vllm takes the API's own; else a folder with"
        " such a file, or the file",
        metavar="auto|vllm|PATH",
    ),
    Flag(
        "--override-generation-config",
        str,
        'default sampling parameters that override those, such as {"temperature": 0.7}',
        metavar="JSON",
    ),
    Flag(
        "--max-logprobs",
        at_least(-1),
        "most log probabilities that a request may ask for; -1: the whole vocabulary",
    ),
    Flag(
        "--tool-call-parser",
        tuple(TOOL_FORMATS),
        "format of the model's tool calls (default: recognised from its chat template)",
    ),
    Flag(
        "--enable-auto-tool-choice",
        bool,
        "accept tool_choice auto: the model decides whether to call a tool",
    ),
    Flag(
        "--reasoning-parser",
        tuple(REASONING_FORMATS),
        "format of the model's reasoning; answers then have it in a field of its own",
    ),
    Flag(
        "--pooler-config",
        str,
        'how prompts are embedded, such as {"pooling_type": "MEAN", "use_activation": false}'
        " (default: the last token's hidden state, with a length of 1)",
        metavar="JSON",
    ),
    Flag("--seed", int, "seed of the seeds drawn for requests without one (default: random)"),
)


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    """Where to listen, whom to let in, how much to take."""
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    text = "port to bind; 0 picks a free one (default %(default)s)"
    add("--port", type=port, default=8000, help=text)
    add_flags(group, _SERVER[:1])
    # "extend", so that a flag given twice does not lose what it was given first.
    names = "names under which to serve the model (default: the model's)"
    add("--served-model-name", nargs="+", action="extend", help=names)
    keys = "bearer keys that the /v1 routes require (default: none)"
    add("--api-key", nargs="+", action="extend", default=[], help=keys)
    add_flags(group, _SERVER[1:])


def read_chat_template(options: argparse.Namespace) -> str | None:
    """The text of `--chat-template`. Raises `ConfigError` when there is no such file."""
    given: str | None = options.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: {error}") from error


def api_config(
    options: argparse.Namespace,
    checkpoint: Checkpoint | None,
    max_model_len: int,
    environment: Mapping[str, str],
) -> ApiConfig:
    """The front end's configuration. Raises `ConfigError`."""
    if options.max_body_bytes > MAX_BODY_BYTES_LIMIT:
        raise ConfigError(f"--max-body-bytes may be {MAX_BODY_BYTES_LIMIT} at most")
    name = SIM_MODEL_NAME if checkpoint is None else checkpoint.name
    path = None if checkpoint is None else str(checkpoint.path)
    return configured(
        ApiConfig,
        options,
        served_model_names=tuple(options.served_model_name or (name,)),
        max_model_len=max_model_len,
        vocab_size=sim.VOCAB_SIZE if checkpoint is None else checkpoint.vocab_size,
        pooler=_pooler_config(options.pooler_config),
        embedding_size=HIDDEN_SIZE if checkpoint is None else checkpoint.hidden_size,
        accepted_model_names=() if path is None else (path,),
        model_root=path or name,
        api_keys=_api_keys(options, environment),
        enable_priority=options.policy == "priority",
        sse_keep_alive_seconds=options.sse_keep_alive_interval or None,
        enable_admin_routes=options.enable_admin_routes
        or environment.get("VLLM_SERVER_DEV_MODE") == "1",
        default_sampling=_default_sampling(options, checkpoint, max_model_len),
    )


def _api_keys(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The flag's, or those of the environment, which other users of the machine cannot see."""
    named = environment.get("POINTSMAN_API_KEY") or environment.get("VLLM_API_KEY") or ""
    if not all(key.strip() for key in options.api_key):
        raise ConfigError("--api-key must not be empty: it would let everybody in")
    return tuple(options.api_key) or tuple(key for key in named.split(",") if key)


def _pooler_config(given: str | None) -> PoolerConfig:
    if given is None:
        return PoolerConfig()
    try:
        unknown = msgspec.json.decode(given, type=dict[str, Any]).keys() - PoolerConfig.__slots__
        if unknown:
            names = ", ".join(PoolerConfig.__slots__)
            raise ConfigError(f"--pooler-config: unknown {min(unknown)!r}; known are {names}")
        return msgspec.json.decode(given, type=PoolerConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--pooler-config: {error}") from error


def _default_sampling(
    options: argparse.Namespace, checkpoint: Checkpoint | None, max_model_len: int
) -> tuple[tuple[str, float], ...]:
    known = _generation_config(options.generation_config, checkpoint)
    try:
        given = msgspec.json.decode(options.override_generation_config, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--override-generation-config: not a JSON object: {error}") from error
    for name, value in given.items():
        if name not in _GENERATION_FIELDS:
            names = ", ".join(_GENERATION_FIELDS)
            raise ConfigError(f"--override-generation-config: unknown {name!r}; known are {names}")
        if not _is_number(value):
            raise ConfigError(f"--override-generation-config: {name} must be a number")
    known.update(given)
    defaults = {
        field: known[name]
        for name, field in sorted(_GENERATION_FIELDS.items())
        if _is_number(known.get(name))
    }
    _check_defaults(defaults, max_model_len)
    return tuple(defaults.items())


def _generation_config(source: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """By the names of `generation_config.json`."""
    if source == "auto":
        if checkpoint is None:
            return {}
        return catalog_sampling(checkpoint.path) | checkpoint.generation_config
    if source == "vllm":
        return {}
    path = Path(source).expanduser()
    try:
        text = (path / "generation_config.json" if path.is_dir() else path).read_bytes()
        return msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a JSON object: {error}"
        raise ConfigError(
            f"--generation-config {source}: {reason}; it takes auto, vllm, or a folder with a"
            " generation_config.json"
        ) from error


def _check_defaults(defaults: Mapping[str, float], max_model_len: int) -> None:
    """Would a request that says nothing be refused for what it never sent?"""
    whole = {name: defaults[name] for name in ("top_k", "max_tokens") if name in defaults}
    try:
        for name, value in whole.items():
            if value != int(value) or value < (1 if name == "max_tokens" else -1):
                raise RequestError(f"{name} cannot be {value}")
        limits = ModelLimits(max_model_len, sim.VOCAB_SIZE)
        context = SamplingContext(limits, lambda _: [], defaults)
        sampling_params(SamplingFields(), 1, None, context, random.Random(0))
    except (RequestError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"default sampling parameters (--override-generation-config, or the"
            f" generation_config.json, which --generation-config vllm leaves aside): {error}"
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def tls_config(options: argparse.Namespace) -> TlsConfig | None:
    """HTTPS, when a certificate is given."""
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None and key is None:
        if options.ssl_ca_certs is not None:
            raise ConfigError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile")
        return None
    if certificate is None or key is None:
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together")
    for path in (certificate, key, options.ssl_ca_certs):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
    _try_certificate(certificate, key, options.ssl_ca_certs)
    return TlsConfig(certificate, key, options.ssl_ca_certs)


def _try_certificate(certificate: str, key: str, ca_certs: str | None) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    flags = "--ssl-certfile and --ssl-keyfile"
    try:
        # An encrypted key would make every start wait for somebody to type the password.
        context.load_cert_chain(certificate, key, password=lambda: b"")
        if ca_certs is not None:
            flags = "--ssl-ca-certs"
            context.load_verify_locations(ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{flags}: not usable PEM files: {error}") from error
