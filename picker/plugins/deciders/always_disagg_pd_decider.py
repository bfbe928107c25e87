"""always-disagg-pd-decider: every request gets a prefill endpoint of its own.

run ⇔ true
"""

from __future__ import annotations

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Candidate, InferenceRequest


class AlwaysDecider:
    """Says yes. Stateless."""

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        """Yes."""
        return True


PLUGIN = PluginType("always-disagg-pd-decider", Parameters, plain(AlwaysDecider))
