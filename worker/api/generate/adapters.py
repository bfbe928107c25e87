"""The models that requests can name: the served one, and LoRA adapters that the engine loaded."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.api.generate.engine import Commands
from worker.api.schema.parse import shown
from worker.config import ServeConfig
from worker.engine.messages import LoadAdapter, UnloadAdapter
from worker.errors import ConfigError, RequestError
from worker.kv.content import model_digest
from worker.types import Adapter

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A loaded adapter. `parent` is the model that lists its name; `created` is a Unix time."""

    adapter: Adapter
    parent: str
    created: int


class ServedAdapters:
    """Owns the names. Without `has_files`, any path is accepted for an adapter."""

    def __init__(
        self,
        engine: Commands,
        base_names: tuple[str, ...],
        has_files: bool,
        accepted_names: tuple[str, ...] = (),
    ) -> None:
        self._engine = engine
        self._base_names = base_names
        self._model_names = frozenset((*base_names, *accepted_names))
        self._has_files = has_files
        self._by_name: dict[str, ServedAdapter] = {}
        self._numbers = itertools.count(1)
        self._loaded: Counter[tuple[str, str]] = Counter()
        self._changing = asyncio.Lock()

    @property
    def all(self) -> list[ServedAdapter]:
        return list(self._by_name.values())

    def adapter_of(self, model: str | None) -> Adapter | None:
        """Return the adapter of a name; None for the model itself. Raises `RequestError` (404)."""
        if not model or model in self._model_names:
            return None
        served = self._by_name.get(model)
        if served is None:
            raise unknown_model(model, [*self._base_names, *self._by_name])
        return served.adapter

    async def load(
        self, name: str, path: str, parent: str | None = None, in_place: bool = False
    ) -> None:
        """Serve an adapter; running requests keep the previous one. Raises `RequestError`."""
        if not name or not path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            raise RequestError(message, type="InvalidUserInput")
        # Two loads of one name would leave the other adapter in the engine for ever.
        async with self._changing:
            if name in self._by_name and not in_place:
                raise RequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the"
                    " adapter in place, set 'load_inplace' to True.",
                    type="InvalidUserInput",
                )
            if "," in name or not name.isprintable():  # metrics list names between commas
                message = "'lora_name' must be printable, and without a comma."
                raise RequestError(message, "lora_name", type="InvalidUserInput")
            if name in self._base_names:
                message = f"'{name}' is the name of the served model: choose another."
                raise RequestError(message, "lora_name", type="InvalidUserInput")
            digest = ""
            if self._has_files:
                digest = await asyncio.to_thread(_digest, name, path)
            # Files at a path may change between loads; the prefix cache must not mix them.
            version = self._loaded[name, path]
            adapter = Adapter(name, path, next(self._numbers), version, digest)
            reply = await self._engine.run(LoadAdapter(0, adapter))
            if not reply.ok:
                message = f"Loading lora {name} failed: {reply.error}"
                raise RequestError(message, "lora_path")
            self._loaded[name, path] += 1
            replaced = self._by_name.get(name)
            parent = parent or self._base_names[0]
            self._by_name[name] = ServedAdapter(adapter, parent, int(time.time()))
            # Only now, as requests that name it were served until the new one was there.
            if replaced is not None:
                await self._engine.run(UnloadAdapter(0, replaced.adapter))

    async def unload(self, name: str) -> None:
        """Stop serving a name; earlier requests are still answered. Raises `RequestError`."""
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise RequestError(message, type="InvalidUserInput")
        async with self._changing:
            served = self._by_name.pop(name, None)
            if served is None:
                message = f"The lora adapter '{name}' cannot be found."
                raise RequestError(message, "lora_name", 404, "NotFoundError")
            await self._engine.run(UnloadAdapter(0, served.adapter))


async def load_adapters(config: ServeConfig, engine: Commands) -> ServedAdapters:
    """Load the adapters of `--lora-modules`. Raises `ConfigError`."""
    api, has_files = config.api, config.engine.engine != "sim"
    adapters = ServedAdapters(engine, api.served_model_names, has_files, api.accepted_model_names)
    for module in config.lora_modules:
        try:
            await adapters.load(module.name, module.path, module.base_model_name)
        except RequestError as error:
            raise ConfigError(f"--lora-modules {module.name}: {error}") from error
    return adapters


def unknown_model(name: str, served_names: Sequence[str]) -> RequestError:
    served = ", ".join(served_names)
    message = f"The model `{shown(name)}` does not exist. Valid aliases: {served}."
    return RequestError(message, "model", 404, "NotFoundError")


def _digest(name: str, path: str) -> str:
    for file in _FILES:
        if not (Path(path) / file).is_file():
            message = f"Loading lora {name} failed: No adapter found for {path}: it has no {file}."
            raise RequestError(message, "lora_path", 404, "NotFoundError")
    try:
        return model_digest(Path(path))
    except OSError as error:
        message = f"Loading lora {name} failed: {error}"
        raise RequestError(message, "lora_path") from error
