"""prefill-filter: keep the endpoints that may run the prefill stage of a request.

    keep ⇔ llm-d.ai/role ∈ {prefill, encode-prefill, prefill-decode, both, encode-prefill-decode}

An endpoint without the label decodes only.
"""

from __future__ import annotations

from picker.framework.disaggregation import PREFILL_ROLES, ROLE_LABEL
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins.filters.by_label import LabelValueFilter

PLUGIN = PluginType(
    "prefill-filter", Parameters, plain(lambda: LabelValueFilter(ROLE_LABEL, PREFILL_ROLES))
)
