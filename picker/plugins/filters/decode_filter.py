"""decode-filter: keep the endpoints that may run the decode stage of a request.

    keep ⇔ llm-d.ai/role ∈ {decode, prefill-decode, both, encode-prefill-decode}, or absent

An endpoint without the label is taken for one that does everything.
"""

from __future__ import annotations

from picker.framework.disaggregation import DECODE_ROLES, ROLE_LABEL
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins.filters.by_label import LabelValueFilter

PLUGIN = PluginType(
    "decode-filter",
    Parameters,
    plain(lambda: LabelValueFilter(ROLE_LABEL, DECODE_ROLES, allows_no_label=True)),
)
