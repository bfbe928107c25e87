"""What attaches to the scheduler; nothing here is imported by it.

adapters          LoRA adapters and their slots on the device
beam_sequences    beam searches: the sequences that hold live beams
remote_kv         KV taken from other engines, and kept for them
speculation       drafts: where they come from and how many a step verifies
"""
