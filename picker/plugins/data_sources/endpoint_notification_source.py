"""endpoint-notification-source: the endpoints themselves, as they join and change.

Takes no parameters. Its extractors are asked once for each endpoint, and again when it changes.
"""

from __future__ import annotations

from picker.framework.registry import Parameters, PluginType, itself


class EndpointNotificationSource(Parameters, frozen=True):
    """`parameters` of an endpoint-notification-source, and the plugin itself."""

    @property
    def location(self) -> None:
        """There is no page to ask for."""
        return None


PLUGIN = PluginType("endpoint-notification-source", EndpointNotificationSource, itself)
