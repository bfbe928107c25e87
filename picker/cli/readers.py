"""Readers of the values of flags; each raises `ConfigError` for a text that it refuses."""

import re
from pathlib import Path
from typing import Final

from base.flags import LAST_PORT, Dialect, Reader, Readers, rows, whole_number
from base.response_bodies import ResponseBodies
from picker.cli.options import POOL_GROUPS
from picker.cli.pools import DNS_LABEL, DNS_NAME, pool_flags
from picker.cli.table import FLAGS
from picker.config.decode import duration_seconds, quantity_bytes
from picker.errors import ConfigError
from picker.extproc.machine.request_phase import DEFAULT_MAX_BODY_BYTES
from picker.framework.label_selector import LabelSelector
from picker.rpc.options import DEFAULT_MAX_MESSAGE_BYTES

_LEVELS: Final = {"debug": 4, "info": 2, "error": 0}


def namespace(text: str) -> str:
    if text and not DNS_LABEL.fullmatch(text):
        raise ConfigError(f"'{text}' is no name of a namespace; write a DNS label, e.g. team-a")
    return text


def _path(text: str) -> Path | None:
    """Read a path; None for "", which is the reference's default and what templates render."""
    return Path(text) if text else None


def _ports(text: str) -> list[int]:
    ports = []
    for word in text.strip("[]").split(",") if text else ():
        word = word.strip()
        if not (word.isascii() and word.isdecimal() and 1 <= int(word) <= 65535):
            raise ConfigError(
                f"'{word}' is no port; write numbers from 1 to 65535, separated by commas"
            )
        ports.append(int(word))
    return ports


def _size(least: int, why: str, absent: int | None = None) -> Reader:
    """Return a reader of sizes; `absent` is the value of "", and may be below `least`."""

    def read(text: str) -> int:
        found = absent if absent is not None and not text else quantity_bytes(text)
        if found < least and found != absent:
            raise ConfigError(f"'{text}' is too little: {why}")
        return found

    return read


def _pool_name(text: str) -> str:
    if text and not DNS_NAME.fullmatch(text):
        raise ConfigError(
            f"'{text}' is no name of an object; write lower case letters, digits, '-' and '.'"
        )
    return text


def _pool_group(text: str) -> str:
    if text not in ("", *POOL_GROUPS):
        raise ConfigError(f"'{text}' has no pools; write {' or '.join(POOL_GROUPS)}")
    return text or POOL_GROUPS[0]


def _selector(text: str) -> str:
    if text and not text.strip():
        raise ConfigError("is empty and would take every Pod of the namespace")
    try:
        LabelSelector.parse(text)
    except ValueError as error:
        raise ConfigError(f"'{text}': {error}") from error
    return text.strip()


def _verbosity(text: str) -> int:
    if not re.fullmatch(r"-?\d+", text, re.ASCII):
        raise ConfigError(f"'{text}' is no number")
    return int(text)


def _level(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    if text not in _LEVELS:
        raise ConfigError(f"'{text}' is no level; write debug, info, error or a number")
    return _LEVELS[text]


def _encoder(text: str) -> str:
    if text not in ("console", "json"):
        raise ConfigError(f"'{text}' is no encoder; write console or json")
    return text


def _response_bodies(text: str) -> ResponseBodies:
    try:
        return ResponseBodies(text or ResponseBodies.OFF)
    except ValueError:
        raise ConfigError(f"'{text}' is none of off, usage and all") from None


# By flag, or by the name of its value.
READERS: Final[Readers] = {
    "FILE": _path,
    "DIR": _path,
    "PORT": whole_number(0, LAST_PORT),
    "PORTS": _ports,
    "DURATION": duration_seconds,
    "NAMESPACE": namespace,
    "GROUP": _pool_group,
    "SELECTOR": _selector,
    "POOL": pool_flags,
    "NAMES": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    "YAML": lambda text: text or None,
    "--pool-name": _pool_name,
    "--grpc-max-recv-msg-size": _size(
        64 * 1024, "the headers of a request may have 64KiB", DEFAULT_MAX_MESSAGE_BYTES
    ),
    "--grpc-max-send-msg-size": _size(2**20, "the picker's messages may have 1MiB", 0),
    "--max-unfinished-bodies": _size(DEFAULT_MAX_BODY_BYTES, "one request body may have 64MiB"),
    "--metrics-client-label-bytes": _size(64 * 1024, "a single tenant may take 64Ki"),
    "--record-max-bytes": _size(64 * 1024, "write 64Ki or more"),
    "--v": _verbosity,
    "--zap-log-level": _level,
    "--zap-encoder": _encoder,
    "--response-bodies": _response_bodies,
}
# Flags that may be given several times.
_SETTINGS: Final = {
    "--pool": {"action": "append", "default": []},
    "--endpoint-target-ports": {"action": "extend", "default": []},
}
# Values that cannot be empty. All others can, because templates render what is absent as "".
_NOT_EMPTY: Final = frozenset({None, "PORT", "DURATION", "LEVEL"})
# Fields of the options whose names differ from those of their flags.
_FIELDS: Final = {
    "--grpc-max-recv-msg-size": "grpc_max_recv_msg_bytes",
    "--max-unfinished-bodies": "max_unfinished_body_bytes",
    "--metrics-endpoint-auth": "metrics_auth",
    "--enable-grpc-stream-metrics": "grpc_stream_metrics",
    "--refresh-prometheus-metrics-interval": "pool_gauges_interval_seconds",
    "--refresh-metrics-interval": "refresh_metrics_interval_seconds",
    "--metrics-staleness-threshold": "metrics_staleness_threshold_seconds",
    "--drain-timeout": "drain_timeout_seconds",
}
DIALECT: Final = Dialect(
    readers=READERS,
    defaults={row.dest: "" for row in rows(FLAGS) if row.metavar not in _NOT_EMPTY},
    fields=_FIELDS,
    errors=(ConfigError,),
    takes_truth=True,
    settings=_SETTINGS,
)
