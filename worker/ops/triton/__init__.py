"""The model's arithmetic as Triton kernels, for a GPU, or for a CPU in Triton's interpreter. Of a
step they need shapes alone, and nothing waits for the device.

Importing a module of this room imports Triton.
"""
