"""A picker that the suite starts, with its ports and its files filled into a command line."""

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from conformance.case import Provision
from conformance.ports import free_ports
from conformance.waiting import ended

CONFIG = Path(__file__).with_name("config.yaml")
POOL = "conformance"
SHEDDABLE = "sheddable"
_END_SECONDS = 10.0


class CommandError(Exception):
    """The command line cannot be used; the text says why."""


class CommandPicker:
    """A process of a command line; the sole owner of the process and of its endpoints file.

    In the command `{grpc_port}`, `{health_port}`, `{metrics_port}`, `{endpoints_file}`,
    `{config_file}` and `{pool_name}` are filled in, and what `places` names. Its output goes to
    `picker.log` in `folder`.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        endpoints: Sequence[str],
        *,
        provides: frozenset[Provision],
        config: Path = CONFIG,
        places: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        grpc_port, health_port, metrics_port = free_ports(3)
        self._folder = folder
        self._endpoints_file = folder / "endpoints.yaml"
        self.address = f"127.0.0.1:{grpc_port}"
        self.log = folder / "picker.log"
        filled = {
            "grpc_port": str(grpc_port),
            "health_port": str(health_port),
            "metrics_port": str(metrics_port),
            "endpoints_file": str(self._endpoints_file),
            "config_file": str(config),
            "pool_name": POOL,
            **(places or {}),
        }
        self._argv = [_fill(word, filled) for word in command]
        has_health = any("{health_port}" in word for word in command)
        self.health_address = f"127.0.0.1:{health_port}" if has_health else None
        self.is_tls = Provision.TLS in provides
        given = {Provision.RESTART}
        given |= {Provision.HEALTH} if has_health else set()
        if any("{endpoints_file}" in word for word in command):
            given |= {Provision.POOL_CHANGES}
        self.provides = provides | given
        self._environment = None if environment is None else {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None
        if Provision.POOL_CHANGES in given:
            self._write(endpoints)

    @property
    def is_running(self) -> bool:
        """True while the started process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Raises `CommandError` where the program cannot be started."""
        if self.is_running:
            return
        try:
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                )
        except OSError as error:
            raise CommandError(f"cannot start {shlex.join(self._argv)}: {error}") from error

    async def kill(self) -> None:
        """Send SIGKILL to the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def end(self, limit_seconds: float = _END_SECONDS) -> int | None:
        """The exit status; None when it runs on after the limit."""
        return None if self._process is None else await ended(self._process, limit_seconds)

    async def use_pool(self, endpoints: Sequence[str]) -> None:
        """Replace the endpoints file."""
        self._write(endpoints)

    def last_words(self, lines: int = 12) -> str:
        """The end of what it has written."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _write(self, endpoints: Sequence[str]) -> None:
        unfinished = self._endpoints_file.with_suffix(".new")
        unfinished.write_text(endpoints_document(endpoints))
        os.replace(unfinished, self._endpoints_file)


def endpoints_document(endpoints: Sequence[str]) -> str:
    """The file of file discovery, with the objective that may be shed."""
    listed = [
        {"name": f"echo-{at}", "address": host.strip("[]"), "port": port}
        for at, (host, _, port) in enumerate(entry.rpartition(":") for entry in endpoints)
    ]
    objective = {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": SHEDDABLE},
        "spec": {"poolRef": {"name": POOL}, "priority": -1},
    }
    return yaml.safe_dump_all([{"endpoints": listed}, objective], sort_keys=False)


def _fill(word: str, filled: Mapping[str, str]) -> str:
    for name, value in filled.items():
        word = word.replace("{" + name + "}", value)
    return word


def unknown_places(command: str, known: Sequence[str]) -> list[str]:
    """The `{names}` of a command line that nothing is filled in for."""
    names = {part.partition("}")[0] for part in command.split("{")[1:]}
    return sorted(name for name in names if name.isidentifier() and name not in known)
