"""Features that attach to the scheduler, which imports their interface alone.

interface         the hooks of a feature
adapters          LoRA adapters and their slots on the device
remote_kv         KV fetched from other engines, and exported for them
grammars          outputs that must match a grammar
tiered_cache      tiers below the prefix cache
speculation       drafts: where they come from and how many a step verifies
"""
