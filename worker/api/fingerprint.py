"""`system_fingerprint`: by which clients tell that what answers them has changed."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec

from worker.api.probes import package_version
from worker.config import EngineConfig


def system_fingerprint(config: EngineConfig) -> str:
    """`pointsman-<version>-<8 hex digits>` of the engine's configuration. What is secret in it (the
    seed of the block hashes) or differs between workers that answer alike is left out: so is
    speculation, unless its drafts are drawn at random, which changes what a seed gives.
    """
    public = dataclasses.replace(config, prefix_caching_hash_seed=None)
    speculative = config.speculative
    if speculative is not None and speculative.draft_sample_method != "probabilistic":
        public = dataclasses.replace(public, speculative=None)
    shape = {
        name: value
        for name, value in msgspec.to_builtins(public).items()
        if name not in ("kv_events", "num_threads")
    }
    digest = hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()
    return f"pointsman-{package_version()}-{digest[:8]}"
