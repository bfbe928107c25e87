"""A worker's flags as keyword arguments: `max_model_len=4096` stands for `--max-model-len 4096`."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from base.flags import Parser, near
from worker.cli.flags import build_parser
from worker.errors import ConfigError

# Groups of the table, and single flags, that only a server has a use for.
_GROUPS = ("server", "engine failures")
_OF_A_SERVER = frozenset(
    {"--kv-events-config", "--kv-transfer-config", "--pd-proxy", "--prefiller-networks"}
    | {"--prefill-timeout", "--tool-call-parser", "--enable-auto-tool-choice"}
    | {"--reasoning-parser"}
)


class _Keywords(Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.hinted(message))


def options_of(keywords: Mapping[str, Any]) -> argparse.Namespace:
    """Check keyword arguments by the table of flags; None is the default. Raises `ConfigError`."""
    parser = build_parser(_Keywords)
    flags = {
        _keyword(spelling): (spelling, action)
        for spelling, action in parser._option_string_actions.items()
        if spelling.startswith("--") and not spelling.startswith(("--no-", "--help"))
    }
    refused = {
        spelling
        for group in parser._action_groups
        if group.title in _GROUPS
        for action in group._group_actions
        for spelling in action.option_strings
    }
    argv: list[str] = []
    for name, value in keywords.items():
        if name not in flags:
            raise ConfigError(f"LLM takes no {name}{near(name, flags)}")
        flag, action = flags[name]
        if flag in refused | _OF_A_SERVER:
            raise ConfigError(f"LLM takes no {name}: {flag} is for `pointsman worker` alone")
        if value is not None:
            argv += _arguments(name, flag, action, value)
    return parser.parse_args(argv)


def _keyword(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _arguments(name: str, flag: str, action: argparse.Action, value: object) -> Iterator[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} takes True or False, not {value!r}")
        if value or f"--no-{flag[2:]}" in action.option_strings:
            yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, Mapping):
        yield f"{flag}={json.dumps(value)}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        texts = [str(one) for one in value]
        # A flag that takes many is given once for each; the others take lists with commas.
        for text in texts if action.nargs == "+" else [",".join(texts)]:
            yield f"{flag}={text}"
    else:
        yield f"{flag}={value}"
