"""single-profile-handler: one profile, once."""

from __future__ import annotations

import pytest
from plugin_scenes import candidate, request_for

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.plugins.profile_handlers.single_profile_handler import SingleProfileHandler
from picker.types import ProfileResult, ScoredEndpoint


def test_the_only_profile_runs_once_and_is_primary() -> None:
    """Its picked endpoints, in order, are the fallback list."""
    handler, request = SingleProfileHandler(), request_for()
    assert handler.max_profiles == 1
    assert list(handler.pick_profiles(request, ["default"], {}, Attributes())) == ["default"]
    picked = (ScoredEndpoint(candidate("a"), 2.0), ScoredEndpoint(candidate("b"), 1.0))
    results = {"default": ProfileResult(picked)}
    assert not handler.pick_profiles(request, ["default"], results, Attributes())
    result = handler.process_results(request, results)
    assert [endpoint.name for endpoint in result.endpoints] == ["a", "b"]
    assert result.primary_profile == "default"
    assert result.profiles == results


@pytest.mark.parametrize("found", [None, ProfileResult(())])
def test_a_profile_that_found_nothing_is_refused(found: ProfileResult | None) -> None:
    """429: there is no destination."""
    with pytest.raises(RefusedError) as refusal:
        SingleProfileHandler().process_results(request_for(), {"default": found})
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
