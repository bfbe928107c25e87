"""by-label-selector: the former name of label-selector-filter, with the same parameters.

Deprecated; the reference removes it in v0.11.0.
"""

from __future__ import annotations

from picker.framework.label_selector import LabelSelectorParameters
from picker.framework.registry import PluginType, Stability, configured
from picker.plugins.filters.label_selector_filter import LabelSelectorFilter

PLUGIN = PluginType(
    "by-label-selector",
    LabelSelectorParameters,
    configured(LabelSelectorFilter),
    stability=Stability.DEPRECATED,
)
