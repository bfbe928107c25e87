"""What a process does to record its decisions, where that is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.metadata import version

from picker.cli.options import Options, RecordFlags
from picker.config.build import Assembly
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.recording.file import RecordingFile
from picker.recording.lines import FORMAT_VERSION, Header
from picker.recording.privacy import readable
from picker.recording.recorder import ConfigText, Recorder
from picker.requestcontrol.pipeline import RequestPipeline

log = logging.getLogger(__name__)


class RecordingSide:
    """Owns the recording, if there is one; then `endpoint_removed` has to be called as an
    `EndpointObserver`'s, and `use` with every configuration.
    """

    def __init__(self, options: Options, hash_seed: int, metrics: PickerMetrics) -> None:
        """Opens the file. Raises `ConfigError` for one that cannot be added to."""
        self._options, self._hash_seed = options, hash_seed
        self._clock = time.monotonic
        self._in_use: Assembly | None = None
        self._file: RecordingFile | None = None
        self._recorder: Recorder | None = None
        flags = options.record
        if flags is not None:
            self._file = RecordingFile(flags.path, flags.max_bytes, metrics.recording)
            self._recorder = Recorder(self._file, self._clock)
            prompts = "with prompts" if flags.keeps_prompts else "without prompts"
            log.info("decisions are recorded in %s, %s", flags.path, prompts)

    def follow(self, datastore: Datastore) -> None:
        """Record what becomes of the pool."""
        if self._recorder is not None:
            datastore.subscribe(self._recorder.endpoints_changed)

    def endpoint_removed(self, key: str) -> None:
        """Plugins forget the endpoint."""
        if self._recorder is not None:
            self._recorder.endpoint_removed(key)

    def pipeline(self, assembly: Assembly, pipeline: RequestPipeline) -> RequestPipeline:
        """`pipeline` of `assembly`, which is in use from now on, with its decisions recorded."""
        recorder, flags = self._recorder, self._options.record
        if recorder is None or flags is None:
            return pipeline
        if self._in_use is None:
            recorder.begin(self._header(assembly, flags), tuple(assembly.profiles))
        elif self._in_use is not assembly:
            loaded = assembly.loaded
            text = loaded.content.decode()
            recorder.configured(ConfigText(loaded.source.name, text, tuple(assembly.profiles)))
        self._in_use = assembly
        return recorder.recorded(pipeline)

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Write until these are cancelled."""
        if self._file is None:
            return []
        return [group.create_task(self._file.run(), name="recording")]

    async def close(self) -> None:
        """End the recording; what is recorded by then is written."""
        if self._file is not None and self._recorder is not None:
            self._recorder.settle()
            await self._file.close(self._clock())

    def _header(self, assembly: Assembly, flags: RecordFlags) -> Header:
        loaded = assembly.loaded
        return Header(
            format_version=FORMAT_VERSION,
            picker_version=version("pointsman"),
            pool_name=readable(self._options.pool_name),
            config_name=readable(loaded.source.name),
            config=loaded.content.decode(),
            hash_seed=self._hash_seed,
            has_prompts=flags.keeps_prompts,
            started_at=self._clock(),
            started_at_unix=time.time(),
            allow_experimental_plugins=self._options.allow_experimental_plugins,
            strict_data_scope=self._options.strict_data_scope,
        )
