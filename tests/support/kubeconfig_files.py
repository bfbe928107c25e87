"""Kubeconfig files as tests need them, exec plugins that count their runs, a clock that stands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from picker.k8s.credentials import Access, Credentials, Places, find_credentials


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def kubeconfig(
    path: Path,
    user: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    *,
    name: str = "one",
    current: str | None = "one",
) -> Path:
    """A file with one context."""
    context = {"cluster": name, "user": name}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster or {"server": "http://10.0.0.1:6443/"}}],
        "contexts": [{"name": name, "context": context}],
        "users": [{"name": name, "user": user or {}}],
    }
    if current is not None:
        document["current-context"] = current
    path.write_text(yaml.safe_dump(document))
    return path


def around(home: Path, **environ: str) -> Places:
    """An environment, a home and a place for the service account."""
    return Places(environ, home, home / "serviceaccount")


def found(
    clock: Callable[[], float], home: Path, path: Path | str = "", context: str | None = None
) -> Credentials:
    """The credentials of a file."""
    return find_credentials(str(path), context, clock=clock, places=around(home))


async def access_of(tmp_path: Path, clock: Clock, **given: Any) -> Access:
    """What a kubeconfig file leads to."""
    path = kubeconfig(tmp_path / "config", **given)
    return await found(clock, tmp_path, path).access()


PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
if number in map(int, sys.argv[3:]):
    sys.exit("no luck today")
status = {"token": f"token-{number}"}
if sys.argv[2] != "never":
    status["expirationTimestamp"] = sys.argv[2]
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1",
                  "kind": "ExecCredential", "status": status}))
"""


class Plugin:
    """An exec plugin that counts its runs; its tokens expire at a time, and some runs fail."""

    def __init__(self, folder: Path, expires: str = "never", failing: tuple[int, ...] = ()) -> None:
        script, self._count = folder / "plugin.py", folder / "count"
        script.write_text(PLUGIN)
        arguments = [script, self._count, expires, *failing]
        self.user = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": sys.executable,
                "args": [str(one) for one in arguments],
            }
        }

    @property
    def runs(self) -> int:
        """How often it ran."""
        return int(self._count.read_text()) if self._count.exists() else 0


def in_minutes(minutes: float) -> str:
    """A time as plugins tell it."""
    return (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
