"""data-parallel-profile-handler: the sidecar's port, and the rank in a header."""

from __future__ import annotations

import pytest
from plugin_scenes import configured, placed, request_for, schedule

from picker.errors import Code, RefusedError
from picker.plugins.profile_handlers.data_parallel_profile_handler import PLUGIN
from picker.types import ProfileResult


@pytest.mark.parametrize(("parameters", "port"), [({}, 8000), ({"primaryPort": 9001}, 9001)])
def test_the_destination_is_the_sidecar_of_the_picked_rank(
    parameters: dict[str, int], port: int
) -> None:
    """Only the best is named; the other ranks belong to other headers."""
    ranks = [
        placed(f"pod-{rank}", {"llm-d.ai/role": "decode"}, port=8200 + rank) for rank in (3, 1)
    ]
    handler = configured(PLUGIN, parameters)
    assert handler.max_profiles == 1
    result, runs = schedule(handler, ("decode",), ranks)
    assert runs == [("decode", None)]
    assert [endpoint.host_port for endpoint in result.endpoints] == [f"10.0.0.1:{port}"]
    assert result.endpoints[0].key == "default/pod-3"
    assert result.set_headers == {"x-data-parallel-host-port": "10.0.0.1:8203"}
    assert len(result.profiles["decode"].picked) == 2


@pytest.mark.parametrize("found", [None, ProfileResult(())])
def test_nothing_picked_is_refused(found: ProfileResult | None) -> None:
    """429, as for any other profile handler."""
    with pytest.raises(RefusedError) as refusal:
        configured(PLUGIN).process_results(request_for(), {"default": found})
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
