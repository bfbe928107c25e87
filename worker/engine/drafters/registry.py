"""Builds the drafter that the configuration names."""

from worker.config import SpeculativeConfig
from worker.engine.drafters.finished_outputs import FinishedOutputs
from worker.engine.drafters.interface import Drafter
from worker.engine.drafters.ngram import NgramDrafter
from worker.engine.drafters.suffix import SuffixDrafter
from worker.engine.drafters.suffix_paths import PathLimits

# Of finished outputs, besides their number; bounds the memory that they take to some 80 MB
# (measured; answers of 500 tokens are some 260).
MAX_CACHED_TOKENS = 1 << 17


def build_drafter(config: SpeculativeConfig) -> Drafter | None:
    """Return the drafter of `config.method`; None when that one drafts on the device."""
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        limits = PathLimits(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        max_outputs = config.suffix_decoding_max_cached_requests
        return SuffixDrafter(limits, FinishedOutputs(max_outputs, MAX_CACHED_TOKENS))
    return None
