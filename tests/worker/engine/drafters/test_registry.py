"""The drafter of each method."""

from typing import Any

import pytest

from worker.config import SPECULATIVE_METHODS, SpeculativeConfig
from worker.engine.drafters.interface import DraftContext, Drafter
from worker.engine.drafters.ngram import NgramDrafter
from worker.engine.drafters.registry import build_drafter
from worker.engine.drafters.suffix import SuffixDrafter


def drafter_of(method: str, num_tokens: int, **how: Any) -> Drafter:
    return build_drafter(SpeculativeConfig(method, num_tokens, **how))


def test_methods_that_guess_from_tokens_get_a_drafter_the_others_none() -> None:
    built = {m: build_drafter(SpeculativeConfig(m, 4)) for m in SPECULATIVE_METHODS}
    assert isinstance(built.pop("ngram"), NgramDrafter)
    assert isinstance(built.pop("suffix"), SuffixDrafter)
    assert set(built.values()) == {None}


@pytest.mark.parametrize(("most", "found"), [(2, True), (3, False)])
def test_the_lookup_is_as_configured(most: int, found: bool) -> None:
    drafter = drafter_of("ngram", 4, prompt_lookup_min=most, prompt_lookup_max=most)
    context = DraftContext(0, [5, 1, 2, 3, 1, 2], 6)
    assert (drafter.propose(context, 2) is not None) == found


def test_the_limits_of_suffix_decoding_are_as_configured() -> None:
    context = DraftContext(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 11)

    def drafted(**how: Any) -> int:
        drafts = drafter_of("suffix", 9, **how).propose(context, 9)
        return 0 if drafts is None else len(drafts.token_ids)

    assert drafted() == 4
    assert drafted(suffix_decoding_max_tree_depth=2) == 2
    assert drafted(suffix_decoding_max_spec_factor=1.5) == 6
    assert drafted(suffix_decoding_min_token_prob=0.6) == 0
    for number, expected in ((0, None), (1, (9,))):
        drafter = drafter_of("suffix", 9, suffix_decoding_max_cached_requests=number)
        drafter.end(DraftContext(0, [8, 9], 0), learns=True)
        drafter.learn(10)
        drafts = drafter.propose(DraftContext(1, [7, 8], 2), 9)
        assert (drafts and drafts.token_ids) == expected
