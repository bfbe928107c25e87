"""The model's arithmetic on a CPU, in C++: products with weights as they are on disk, attention
that reads the KV cache in place, norms, activation. No models, no scheduling. `native` is the way
in; where the library is not built or does not know the CPU, torch serves.
"""
