"""The fingerprint changes with settings that change answers."""

import re
from dataclasses import replace

from worker.app import system_fingerprint
from worker.config import EngineConfig, SpeculativeConfig

CONFIG = EngineConfig(engine="torch", model_path="/models/tiny")


def test_a_fingerprint_names_version_and_configuration() -> None:
    first = system_fingerprint(CONFIG)
    assert re.fullmatch(r"pointsman-[^-]+-[0-9a-f]{8}", first)
    assert system_fingerprint(replace(CONFIG)) == first
    assert system_fingerprint(replace(CONFIG, dtype="bfloat16")) != first


def test_the_fingerprint_omits_secrets_and_the_machine() -> None:
    other = replace(CONFIG, prefix_caching_hash_seed="secret", num_threads=7)
    assert system_fingerprint(other) == system_fingerprint(CONFIG)


def test_the_fingerprint_includes_speculation_only_if_it_changes_answers() -> None:
    """Coupled drafts change no token; drafts drawn at random change the draws."""
    coupled = replace(CONFIG, speculative=SpeculativeConfig("ngram", 4))
    assert system_fingerprint(coupled) == system_fingerprint(CONFIG)
    drawn = SpeculativeConfig("eagle", 4, draft_sample_method="probabilistic")
    assert system_fingerprint(replace(CONFIG, speculative=drawn)) != system_fingerprint(CONFIG)
