"""The model's arithmetic on a CPU, in C++: products with weights in their file formats, attention
that reads the KV cache in place, norms, activation. No models, no scheduling. `native` is the
interface; if the library is not built or does not support the CPU, torch takes over.
"""
