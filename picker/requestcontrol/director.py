"""Opens an exchange for each request, with the configuration of the moment.

The shell of a stream calls `Director.begin()` when the stream opens and gets an `Exchange`. It
awaits `Exchange.route()` at most once and calls `Exchange.finish()` exactly once, whatever
happened.
"""

from __future__ import annotations

from picker.requestcontrol.exchange import Exchange
from picker.requestcontrol.pipeline import RequestPipeline, RequestPolicies, Surroundings
from picker.requestcontrol.plugin_log import PluginLog


class Director:
    """Opens exchanges. Owns the reference to the pipeline that new requests use."""

    def __init__(self, pipeline: RequestPipeline, surroundings: Surroundings) -> None:
        self._pipeline = pipeline
        self._surroundings = surroundings
        self._log = PluginLog(surroundings.observer, surroundings.clock)

    def use(self, pipeline: RequestPipeline) -> None:
        """Route new requests with `pipeline`; those under way finish on what they began with."""
        self._pipeline = pipeline

    def begin(self) -> Exchange:
        """A request has started to arrive."""
        return Exchange(self._pipeline, self._surroundings, self._log)


__all__ = ["Director", "Exchange", "RequestPipeline", "RequestPolicies", "Surroundings"]
