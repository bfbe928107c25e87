"""The readers of flags' values. Each takes the text, and raises `ConfigError` for one that cannot
be meant; argparse puts the flag's name before that.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from picker.cli.options import POOL_GROUPS
from picker.cli.pools import DNS_LABEL, DNS_NAME, pool_flags
from picker.config.units import duration_seconds, quantity_bytes
from picker.errors import ConfigError
from picker.extproc.machine.request_phase import DEFAULT_MAX_BODY_BYTES
from picker.framework.label_selector import LabelSelector
from picker.rpc.options import DEFAULT_MAX_MESSAGE_BYTES

Reader: TypeAlias = Callable[[str], Any]
_LEVELS: Final = {"debug": 4, "info": 2, "error": 0}


def checked(read: Reader) -> Reader:
    """`read` as a type of argparse."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def truth(text: str) -> bool:
    """As Go's programs read it."""
    if text.lower() in ("true", "t", "1"):
        return True
    if text.lower() in ("false", "f", "0"):
        return False
    raise ConfigError(f"'{text}' is neither true nor false")


def refused(why: str, harmless: Iterable[str]) -> Reader:
    """A flag that may only ask for what is so anyway."""

    def read(text: str) -> str:
        if text.lower() not in harmless:
            raise ConfigError(why)
        return text

    return read


def namespace(text: str) -> str:
    """That of Kubernetes objects; "": none is named."""
    if text and not DNS_LABEL.fullmatch(text):
        raise ConfigError(f"'{text}' is no name of a namespace; write a DNS label, e.g. team-a")
    return text


def _path(text: str) -> Path | None:
    """None for "", which is the reference's default and what templates render for it."""
    return Path(text) if text else None


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"'{text}' is no port; write a number from 0 to 65535")
    return int(text)


def _ports(text: str) -> list[int]:
    """One or more of them; the flag may stand several times."""
    ports = []
    for word in text.strip("[]").split(",") if text else ():
        word = word.strip()
        if not (word.isascii() and word.isdecimal() and 1 <= int(word) <= 65535):
            raise ConfigError(
                f"'{word}' is no port; write numbers from 1 to 65535, separated by commas"
            )
        ports.append(int(word))
    return ports


def _number(most: int) -> Reader:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) > most:
            raise ConfigError(f"must be a number from 0 to {most}")
        return int(text)

    return read


def _size(least: int, why: str, absent: int | None = None) -> Reader:
    """`absent` is what "" stands for, and may be below `least`."""

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


# By flag, or by what its value is called.
READERS: Final[Mapping[str, Reader]] = {
    "FILE": _path,
    "DIR": _path,
    "PORT": _port,
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
    "--endpoint-ejection-failures": _number(1000),
    "--decision-records": _number(1_000_000),
    "--v": _verbosity,
    "--zap-log-level": _level,
    "--zap-encoder": _encoder,
}
