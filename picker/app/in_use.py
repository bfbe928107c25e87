"""The configuration in use, and its replacement as a whole."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from base.tracing import Tracing
from picker.app.json_client import JsonClient
from picker.cli.options import Options
from picker.config.build import Assembly, BuildOptions, build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.findings import Finding
from picker.config.load import LoadedConfig, load_config
from picker.config.watch import read_config_file
from picker.errors import ConfigError
from picker.framework.registry import Registry
from picker.framework.services import Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.seeds import seed_of_secret
from picker.telemetry.plugin_metrics import expose_sizes

MIN_SECRET_BYTES = 16


class ConfigInUse:
    """Owns the assembly in use. Listeners must not fail: all checks are made before they run."""

    def __init__(
        self,
        loaded: LoadedConfig,
        registry: Registry,
        metrics: PickerMetrics,
        options: BuildOptions,
    ) -> None:
        self._registry, self._metrics, self._options = registry, metrics, options
        self._assembly = build(loaded, registry, metrics, time.monotonic, options)
        self._listeners: list[Callable[[Assembly], None]] = []
        self.since_unix_seconds = time.time()
        expose_sizes(metrics, self._assembly.instances.values())

    @property
    def assembly(self) -> Assembly:
        return self._assembly

    @property
    def hash_seed(self) -> int:
        return self._options.services.hash_seed

    def subscribe(self, listener: Callable[[Assembly], None]) -> None:
        self._listeners.append(listener)

    def apply(self, loaded: LoadedConfig) -> tuple[Finding, ...]:
        """Apply a configuration; return its warnings. A `ConfigError` leaves all as it was."""
        before = self._assembly
        # A copy, since the build must not change what requests use meanwhile.
        known = MappingProxyType(dict(before.instances))
        options = replace(self._options, before=known)
        assembly = build(loaded, self._registry, self._metrics, time.monotonic, options)
        # The scraper was built from the first data layer, and requests depend on its data.
        for section in assembly.data_layer.differences(before.data_layer):
            text = "cannot change while the picker runs; restart it"
            loaded.findings.error(tuple(section.split(".")), text)
        loaded.findings.refuse_errors()
        self._assembly, self.since_unix_seconds = assembly, time.time()
        expose_sizes(self._metrics, assembly.instances.values(), before.instances.values())
        for listener in self._listeners:
            listener(assembly)
        return assembly.warnings


@dataclass(frozen=True, slots=True)
class Outbound:
    http: JsonClient
    tracing: Tracing

    async def open(self, stack: AsyncExitStack) -> None:
        stack.callback(self.tracing.close)
        await stack.enter_async_context(self.http)


class LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def config_in_use(
    options: Options, loaded: LoadedConfig, outbound: Outbound, metrics: PickerMetrics
) -> ConfigInUse:
    seed = hash_seed_of(options.hash_seed_file)
    building = BuildOptions(
        services=Services(
            http=outbound.http,
            environment=MappingProxyType(dict(os.environ)),
            # Secret, so that no client can make prompts whose hashes collide.
            hash_seed=secrets.randbits(64) if seed is None else seed,
            clock=LoopClock(),
        ),
        allow_experimental=options.allow_experimental_plugins,
        strict_data_scope=options.strict_data_scope,
        lists_models=options.route_by_model,
        token_limits=options.token_limits,
    )
    return ConfigInUse(loaded, builtin_plugins(), metrics, building)


def read_config(options: Options) -> tuple[LoadedConfig, bytes | None]:
    """Return the configuration of the options, or the built-in one, and the content of its file."""
    if options.config_file is not None and options.config_text is not None:
        raise ConfigError("--config-file and --config-text exclude each other")
    if options.config_text is not None:
        content = options.config_text.encode(errors="surrogatepass")
        return load_config(content, "--config-text"), None
    if options.config_file is None:
        return default_config(), None
    content = read_config_file(options.config_file, "--config-file")
    return load_config(content, str(options.config_file)), content


def hash_seed_of(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        text = f"--hash-seed-file: cannot read {path}: {error.strerror or error}"
        raise ConfigError(text) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--hash-seed-file: {path} has {len(secret)} bytes; a secret has {MIN_SECRET_BYTES} "
            "and more"
        )
    return seed_of_secret(secret)
