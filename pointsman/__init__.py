"""The root of the installed package, which contains `picker`, `worker` and `fleet` there.

In the repository they stand beside it: `scripts/one_package.py` moves them as a wheel is built.
`LLM` and the names beside it are loaded when they are first used: the command line needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.errors import RequestError, WorkerError
    from worker.offline import LLM, SamplingParams

__all__ = ["LLM", "RequestError", "SamplingParams", "WorkerError"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("worker.offline"), name)
