"""The model's arithmetic as Triton kernels, for a GPU or, in Triton's interpreter, on a CPU. Nothing
here plans a step's work beyond shapes that the host knows, and nothing waits for the device.

Importing a module of this room imports Triton.
"""
