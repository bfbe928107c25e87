"""KV blocks and their contents; no sequence is known here.

block_manager                  block tables, reference counts, eviction
prefix_cache, block_hash       contents by name, and how blocks are named
free_queue, segmented_queue    the order in which blocks are evicted
tiers                          evicted blocks in host memory and on disk
cache_events                   changes of the cache, for subscribers
"""
