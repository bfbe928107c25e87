"""What owns the device and runs steps: model runner and KV cache, ranks, drafting, the simulator.

It is given plain ints (`worker.types`) and knows nothing of requests or of how steps are chosen.
"""
