"""Every behaviour that forge-infer and kv-cache-scheduler test has a test of the same name here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FORGE_INFER = [
    "allocate_and_free_round_trips",
    "lazy_growth_only_allocates_when_a_block_fills",
    "internal_fragmentation_is_bounded_by_block_size",
    "out_of_blocks_is_reported_and_leaves_state_intact",
    "no_external_fragmentation_after_interleaved_free",
    "eviction_picks_the_largest_sequence",
    "blocks_needed_accounts_for_slack",
    "unknown_sequence_append_errors",
    "peak_blocks_tracks_the_high_water_mark_not_the_current_use",
    "admits_up_to_batch_size",
    "batches_decode_across_sequences",
    "finished_sequences_retire_and_free_blocks",
    "eos_retires_a_sequence_early",
    "idle_when_no_work",
    "preempts_when_blocks_run_out",
    "preempted_sequence_resumes_later",
    "admission_blocks_when_prompt_does_not_fit",
    "full_acceptance_emits_bonus_token",
    "speculative_output_matches_plain_target_decoding",
    "rejection_falls_back_to_a_target_token",
    "acceptance_rate_is_in_range",
    "a_good_draft_yields_a_high_acceptance_rate",
    "deterministic_across_runs",
    "many_requests_all_complete_under_pressure",
    "single_request_produces_requested_tokens",
    "output_is_deterministic",
    "run_prompt_produces_text",
    "forward_is_deterministic",
    "probabilities_sum_to_one",
    "pinned_context_forces_token",
    "draft_and_target_mostly_agree",
    "healthz_reports_ok",
    "generate_returns_a_completion",
    "openai_completions_non_streaming",
    "openai_completions_streams_sse",
]


@pytest.fixture(scope="module")
def names() -> set[str]:
    """The names of all test functions of this suite."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
    return found


@pytest.mark.parametrize("name", FORGE_INFER)
def test_a_counterpart_exists(names: set[str], name: str) -> None:
    """The behaviour is tested here under the name it is known by there."""
    assert f"test_{name}" in names
