"""encode-filter: keep the endpoints that may run the encode stage of a request.

    keep ⇔ llm-d.ai/role ∈ {encode, encode-prefill, encode-prefill-decode}

An endpoint without the label does not encode for others.
"""

from __future__ import annotations

from picker.framework.disaggregation import ENCODE_ROLES, ROLE_LABEL
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins.filters.by_label import LabelValueFilter

PLUGIN = PluginType(
    "encode-filter", Parameters, plain(lambda: LabelValueFilter(ROLE_LABEL, ENCODE_ROLES))
)
