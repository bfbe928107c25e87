"""The producers of the data that plugins consume: defaults, order, and checks."""

from collections.abc import Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any

from picker.config.findings import Path
from picker.config.instances import Instance, Origin, PluginInstances
from picker.framework.attributes import DataKey, FlowLoads
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    ConsumesData,
    DataProducer,
    Filter,
    MayConsumeData,
    PickerPlugin,
    ProducesData,
    RequestProcessor,
    ResponseHeadHook,
    Scorer,
)

Keys = tuple[DataKey[Any], ...]
# What changes requests or responses, or reads or shows its own findings.
_DOES_MORE = RequestProcessor | ResponseHeadHook | FlowLoads | Filter | Scorer | PickerPlugin


def create_missing_producers(plugins: PluginInstances) -> None:
    """Create the default producer of every key that a plugin consumes and no plugin produces."""
    findings, hopeless = plugins.findings, set[DataKey[Any]]()
    # Repeated, since a created producer may need findings itself.
    while missing := _missing(plugins, hopeless):
        consumer, key = missing
        row = plugins.registry.default_producer(key.data_type, key.producer)
        names = {instance.name for instance in plugins}
        if row is not None and row.name == key.producer and key.producer not in names:
            before = len(findings)
            made = plugins.default(row.name, Origin.NEEDED)
            if made is not None and key in produced_by(made):
                continue
            # The parameters that it needs have no defaults.
            if len(findings) > before:
                text = f"'{consumer.name}' needs {key}, whose producer must be configured"
                findings.error(consumer.path, text)
        # Otherwise the producer may be the entry that failed.
        elif plugins.is_complete:
            made_now = _all_produced(plugins)
            others = {one.producer for one in made_now if one.data_type == key.data_type}
            text = f"nothing produces {key}, which '{consumer.name}' needs"
            findings.unknown(_named_at(consumer, key.producer), text, key.producer, others)
        hopeless.add(key)


def producers_in_order(plugins: PluginInstances) -> list[Instance]:
    """Return the data producers sorted: each follows those whose findings it needs or uses."""
    producers = [one for one in plugins if is_producer(one.plugin)]
    makers = {key: one.name for one in producers for key in produced_by(one)}
    needs = {one.name: {makers[k] for k in needed_by(one) if k in makers} for one in producers}
    uses = {one.name: {makers[k] for k in optional_for(one) if k in makers} for one in producers}
    # Optional inputs only affect the order if they close no cycle.
    try:
        order = _sorted({name: needs[name] | uses[name] for name in needs})
    except CycleError:
        try:
            order = _sorted(needs)
        except CycleError as error:
            loop: list[str] = error.args[1]
            text = f"data producers need each other in a circle: {' → '.join(loop)}"
            plugins.findings.error(plugins[loop[0]].path, text)
            order = list(needs)
    return [plugins[name] for name in order]


def check_layers(plugins: PluginInstances) -> None:
    """Report plugins that consume a key before it is produced."""
    late = {
        key: one.name for one in plugins if not is_producer(one.plugin) for key in produced_by(one)
    }
    for one in plugins:
        if is_producer(one.plugin) or isinstance(one.plugin, Admitter):
            for key in needed_by(one):
                maker = plugins[late[key]].plugin if key in late else None
                # Attributes of endpoints are there before any request.
                if maker is not None and not (
                    hasattr(maker, "extract") or hasattr(maker, "describe")
                ):
                    text = f"'{one.name}' needs {key}, which '{late[key]}' makes only afterwards"
                    plugins.findings.error(one.path, text)


def warn_of_unread(plugins: PluginInstances, in_profiles: Collection[str]) -> None:
    """Warn of producers whose findings no used plugin reads; name the plugins that read findings of
    the same type from other producers. A producer that also does something else counts as used.
    """
    read: dict[DataKey[Any], str] = {}
    for one in plugins:
        is_part = isinstance(one.plugin, Filter | Scorer | PickerPlugin)
        if not is_part or one.name in in_profiles:
            read |= dict.fromkeys((*needed_by(one), *optional_for(one)), one.name)
    for one in plugins:
        made = produced_by(one)
        only_produces = is_producer(one.plugin) and not isinstance(one.plugin, _DOES_MORE)
        if one.path and only_produces and read.keys().isdisjoint(made):
            kinds = {key.data_type for key in made}
            others = [
                f"; '{name}' reads what '{key.producer}' produces"
                for key, name in read.items()
                if key.data_type in kinds
            ]
            text = f"nothing uses what '{one.name}' produces{''.join(others)}"
            plugins.findings.warn(one.path, text)


def is_producer(plugin: object) -> bool:
    """Return whether a plugin makes findings between a request's arrival and its scheduling."""
    return isinstance(plugin, DataProducer | AsyncDataProducer)


def _sorted(needs: dict[str, set[str]]) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, others in needs.items():
        # Sorted, so that equal configurations have equal orders.
        sorter.add(name, *sorted(others - {name}))
    return list(sorter.static_order())


def _missing(
    plugins: PluginInstances, hopeless: Iterable[DataKey[Any]]
) -> tuple[Instance, DataKey[Any]] | None:
    produced = _all_produced(plugins)
    for instance in plugins:
        for key in needed_by(instance):
            if key not in produced and key not in hopeless:
                return instance, key
    return None


def _named_at(consumer: Instance, producer: str) -> Path:
    parameters = consumer.parameters
    fields = zip(parameters.__struct_fields__, parameters.__struct_encode_fields__, strict=True)
    named = [key for name, key in fields if getattr(parameters, name) == producer]
    return (*consumer.path, "parameters", named[0]) if named and consumer.path else consumer.path


def _all_produced(plugins: PluginInstances) -> dict[DataKey[Any], None]:
    return dict.fromkeys(key for instance in plugins for key in produced_by(instance))


def produced_by(instance: Instance) -> Keys:
    return instance.plugin.produces if isinstance(instance.plugin, ProducesData) else ()


def needed_by(instance: Instance) -> Keys:
    return instance.plugin.consumes if isinstance(instance.plugin, ConsumesData) else ()


def optional_for(instance: Instance) -> Keys:
    return instance.plugin.may_consume if isinstance(instance.plugin, MayConsumeData) else ()
