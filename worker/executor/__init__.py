"""What owns the device and runs steps: the model runner and its KV cache, drafting, the simulator.

It is given plain ints (`worker.types`) and knows nothing of requests or of how steps are chosen.
"""
