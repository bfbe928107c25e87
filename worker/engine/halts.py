"""Which pauses and sleeps hold, so that an engine started again comes back in them. Pure."""

from __future__ import annotations

from worker.engine.control import MEMORY_TAGS
from worker.engine.messages import Command, Pause, Resume, Sleep, WakeUp


class Halts:
    """Owns what an engine was told about pausing and sleeping, as far as it still holds."""

    def __init__(self) -> None:
        self._is_paused = False
        self._sleep_level: int | None = None
        self._woken: frozenset[str] = frozenset()  # tags that a sleeper has back already

    @property
    def sleep_level(self) -> int | None:
        """As `EngineStats.sleep_level`."""
        return self._sleep_level

    @property
    def is_halted(self) -> bool:
        """As `EngineStats.is_paused`: a pause or a sleep holds."""
        return self._is_paused or self._sleep_level is not None

    def note(self, command: Command) -> None:
        """The engine has carried `command` out."""
        match command:
            case Pause():
                self._is_paused = True
            case Resume():
                self._is_paused = False
            case Sleep(level=level):
                self._sleep_level = max(self._sleep_level or 0, level)
                if level > 0:
                    self._woken = frozenset()
            case WakeUp(tags=tags):
                self._woken |= MEMORY_TAGS if tags is None else frozenset(tags)
                if not self._sleep_level or self._woken >= MEMORY_TAGS:
                    self._sleep_level, self._woken = None, frozenset()

    def commands(self) -> list[Command]:
        """What brings a new engine, which has nothing in flight, to where the last one was; every
        `command_id` is 0.
        """
        commands: list[Command] = []
        if self._is_paused:
            commands.append(Pause(0, "keep"))
        if self._sleep_level is not None:
            commands.append(Sleep(0, self._sleep_level, "keep"))
        if self._woken:
            commands.append(WakeUp(0, sorted(self._woken)))
        return commands
