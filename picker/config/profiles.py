"""Scheduling profiles with their filters, scorers and picker, and the profile handler."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from picker.config.findings import Path
from picker.config.instances import Instance, PluginInstances
from picker.config.schema import EndpointPickerConfig, SchedulingProfile
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    BackgroundFlush,
    DataProducer,
    EndpointObserver,
    Filter,
    KvEventConsumer,
    NamesProfiles,
    PickerPlugin,
    PreRequest,
    ProfileHandler,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Scorer,
    Screener,
)

# Used without a reference; a producer is used by the readers of its findings.
ALWAYS_ASKED = (
    *(ProfileHandler, SaturationDetector, DataProducer, AsyncDataProducer, RequestProcessor),
    *(Screener, Admitter, PreRequest, ResponseHeadHook, ResponseProgressHook, RequestEndHook),
    *(BackgroundFlush, EndpointObserver, KvEventConsumer),
)
DEFAULT_PICKER = "max-score-picker"
DEFAULT_PROFILE_HANDLER = "single-profile-handler"
DEFAULT_PROFILE = "default"


@dataclass(frozen=True, slots=True)
class ProfilePart:
    instance: Instance
    weight: float = 1.0
    path: Path = ()


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """One profile with its plugins, in order; `path` is () without an entry."""

    name: str
    filters: tuple[ProfilePart, ...]
    scorers: tuple[ProfilePart, ...]
    picker: ProfilePart | None
    path: Path = ()


class ProfilePlanner:
    def __init__(self, config: EndpointPickerConfig, plugins: PluginInstances) -> None:
        self._config, self._plugins, self._findings = config, plugins, plugins.findings

    def profiles(self) -> list[ProfilePlan]:
        """Return the configured profiles, or one with every filter, scorer and picker."""
        specs = self._config.scheduling_profiles
        # Before defaults are created, which are no parts of the default profile.
        configured = tuple(self._plugins)
        if not specs:
            parts = [ProfilePart(instance, path=instance.path) for instance in configured]
            return [self._plan(DEFAULT_PROFILE, parts, ())]
        self._check_names(specs)
        return [
            self._plan(spec.name, list(self._parts(index, spec)), ("schedulingProfiles", index))
            for index, spec in enumerate(specs)
        ]

    def profile_handler(self, num_profiles: int) -> Instance | None:
        """Return the configured handler, or the one for a single profile."""
        configured = [one for one in self._plugins if isinstance(one.plugin, ProfileHandler)]
        for second in configured[1:]:
            text = f"a second profile handler beside '{configured[0].name}'; there can be only one"
            self._findings.error(second.path, text)
        at: Path = ("schedulingProfiles",)
        if not configured:
            if num_profiles > 1:
                # Otherwise the handler may be the entry that failed.
                if self._plugins.is_complete:
                    text = "no profile handler is configured, which several profiles need"
                    self._findings.error(at, text)
                return None
            return self._plugins.default(DEFAULT_PROFILE_HANDLER)
        plugin = configured[0].plugin
        limit = plugin.max_profiles if isinstance(plugin, ProfileHandler) else None
        if limit is not None and num_profiles > limit:
            text = f"'{configured[0].name}' takes at most {limit}, not {num_profiles}"
            self._findings.error(at, text)
        self._check_named(configured[0])
        return configured[0]

    def _check_named(self, handler: Instance) -> None:
        plugin, specs = handler.plugin, self._config.scheduling_profiles
        if not isinstance(plugin, NamesProfiles):
            return
        known = {spec.name for spec in specs} or {DEFAULT_PROFILE}
        at: Path = (*handler.path, "parameters")
        for where, name in plugin.required_profiles.items():
            if name not in known:
                text = f"there is no profile '{name}', which '{handler.name}' needs"
                self._findings.unknown((*at, *where.split(".")), text, name, known)
        for where, name in plugin.optional_profiles.items():
            if name not in known and not self._findings.has_errors:
                text = f"there is no profile '{name}', so '{handler.name}' never runs it"
                self._findings.warn((*at, *where.split(".")), text)

    def _check_names(self, specs: Sequence[SchedulingProfile]) -> None:
        names: set[str] = set()
        for index, spec in enumerate(specs):
            if spec.name and spec.name in names:
                text = f"'{spec.name}' is taken by another profile"
                self._findings.error(("schedulingProfiles", index, "name"), text)
            names.add(spec.name)

    def _plan(self, name: str, parts: Sequence[ProfilePart], path: Path) -> ProfilePlan:
        pickers = [part for part in parts if isinstance(part.instance.plugin, PickerPlugin)]
        for second in pickers[1:]:
            text = f"'{second.instance.name}' is a second picker of the profile '{name}'"
            self._findings.error(second.path, text)
        return ProfilePlan(
            name,
            tuple(part for part in parts if isinstance(part.instance.plugin, Filter)),
            tuple(part for part in parts if isinstance(part.instance.plugin, Scorer)),
            pickers[0] if pickers else self._default_picker(),
            path,
        )

    def _parts(self, index: int, spec: SchedulingProfile) -> Iterator[ProfilePart]:
        for position, part in enumerate(spec.plugins):
            path: Path = ("schedulingProfiles", index, "plugins", position)
            instance = self._plugins.referenced(part.plugin_ref, (*path, "pluginRef"))
            if instance is not None and self._fits(instance, part.weight, path):
                yield ProfilePart(instance, 1.0 if part.weight is None else part.weight, path)

    def _fits(self, instance: Instance, weight: float | None, path: Path) -> bool:
        if not isinstance(instance.plugin, Filter | Scorer | PickerPlugin):
            text = f"'{instance.name}' is neither a filter, a scorer nor a picker"
            self._findings.warn((*path, "pluginRef"), f"{text}: a profile makes no use of it")
            return False
        if weight is not None and not math.isfinite(weight):
            self._findings.error((*path, "weight"), "must be a finite number")
        elif weight is not None and not isinstance(instance.plugin, Scorer):
            text = f"'{instance.name}' is no scorer, its weight has no effect"
            self._findings.warn((*path, "weight"), text)
        return True

    def _default_picker(self) -> ProfilePart | None:
        configured = [one for one in self._plugins if isinstance(one.plugin, PickerPlugin)]
        instance = configured[0] if configured else self._plugins.default(DEFAULT_PICKER)
        return ProfilePart(instance) if instance is not None else None

    def warn_of_unnamed(self, in_profiles: Collection[str]) -> None:
        """Report plugins that need a reference and have none."""
        for instance in self._plugins:
            if instance.path[:1] != ("plugins",):
                continue
            if isinstance(instance.plugin, Filter | Scorer | PickerPlugin):
                is_used = instance.name in in_profiles
                text = f"no profile uses the plugin '{instance.name}'"
            else:
                is_used = self._plugins.is_named(instance)
                text = f"nothing uses the plugin '{instance.name}': no section names it"
            if not is_used and not isinstance(instance.plugin, ALWAYS_ASKED):
                self._findings.warn(instance.path, text)


def names_in(plans: Iterable[ProfilePlan]) -> set[str]:
    parts = (part for plan in plans for part in (*plan.filters, *plan.scorers, plan.picker))
    return {part.instance.name for part in parts if part is not None}
