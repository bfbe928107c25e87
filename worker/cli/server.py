"""The flags of the HTTP front end."""

import argparse
import random
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from base.flags import configured
from base.shelves import load_shelf
from worker.api.schema.params import ModelLimits, SamplingContext, sampling_params
from worker.api.schema.requests import SamplingFields
from worker.catalog import catalog_sampling
from worker.cli.objects import converted, decoded, refuse_unknown
from worker.config import SIM_TOKENIZER, ApiConfig, PoolerConfig, TlsConfig
from worker.errors import ConfigError, RequestError
from worker.tokenizer.checkpoint import Checkpoint

SIM_MODEL_NAME = "sim"
_ANY_VOCAB_SIZE = 1 << 20  # it bounds no default
MAX_BODY_BYTES_LIMIT = 64 << 20
# Names in generation_config.json → the fields of requests whose defaults they set.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
_GENERATION_FIELDS = {
    **{name: name for name in (*_SAME, "frequency_penalty")},
    "max_new_tokens": "max_tokens",
}


def read_chat_template(options: argparse.Namespace) -> str | None:
    """Return the text of `--chat-template`. Raises `ConfigError` when there is no such file."""
    given: str | None = options.chat_template
    # Templates have braces, names of files have none.
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
    """Return the front end's configuration. Raises `ConfigError`."""
    if options.max_body_bytes > MAX_BODY_BYTES_LIMIT:
        raise ConfigError(f"--max-body-bytes may be {MAX_BODY_BYTES_LIMIT} at most")
    name = SIM_MODEL_NAME if checkpoint is None else checkpoint.name
    path = None if checkpoint is None else str(checkpoint.path)
    sim: Any = load_shelf(SIM_TOKENIZER)
    return configured(
        ApiConfig,
        options,
        served_model_names=tuple(options.served_model_name or (name,)),
        max_model_len=max_model_len,
        vocab_size=sim.VOCAB_SIZE if checkpoint is None else checkpoint.vocab_size,
        pooler=_pooler_config(options.pooler_config),
        embedding_size=sim.HIDDEN_SIZE if checkpoint is None else checkpoint.hidden_size,
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
    """Return the keys of the flag, else of the environment, which other users cannot read."""
    named = environment.get("POINTSMAN_API_KEY") or environment.get("VLLM_API_KEY") or ""
    if not all(key.strip() for key in options.api_key):
        raise ConfigError("--api-key must not be empty: it would admit every client")
    return tuple(options.api_key) or tuple(key for key in named.split(",") if key)


def _pooler_config(given: str | None) -> PoolerConfig:
    flag = "--pooler-config"
    return PoolerConfig() if given is None else converted(flag, decoded(flag, given), PoolerConfig)


def _default_sampling(
    options: argparse.Namespace, checkpoint: Checkpoint | None, max_model_len: int
) -> tuple[tuple[str, float], ...]:
    known = _generation_config(options.generation_config, checkpoint)
    flag = "--override-generation-config"
    given = decoded(flag, options.override_generation_config)
    refuse_unknown(flag, given, _GENERATION_FIELDS)
    for name, value in given.items():
        if not _is_number(value):
            raise ConfigError(f"{flag}: {name} must be a number")
    known.update(given)
    defaults = {
        field: known[name]
        for name, field in sorted(_GENERATION_FIELDS.items())
        if _is_number(known.get(name))
    }
    _check_defaults(defaults, max_model_len)
    return tuple(defaults.items())


def _generation_config(source: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
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
    """Raise `ConfigError` for defaults with which a request without parameters would be refused."""
    whole = {name: defaults[name] for name in ("top_k", "max_tokens") if name in defaults}
    try:
        for name, value in whole.items():
            if value != int(value) or value < (1 if name == "max_tokens" else -1):
                raise RequestError(f"{name} cannot be {value}")
        limits = ModelLimits(max_model_len, _ANY_VOCAB_SIZE)
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
    """Return the settings of HTTPS if a certificate is given. Raises `ConfigError`."""
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
        # An encrypted key would make every start wait for a password at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
        if ca_certs is not None:
            flags = "--ssl-ca-certs"
            context.load_verify_locations(ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{flags}: not usable PEM files: {error}") from error
