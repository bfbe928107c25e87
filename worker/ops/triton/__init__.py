"""The model's arithmetic as Triton kernels, for a GPU, or for a CPU in Triton's interpreter.
Launches depend only on the shapes of a step, and nothing waits for the device.

Importing a module of this room imports Triton.
"""
