"""The engine: which tokens run in the next step, in which blocks, and the process that serves them.

Everything here works on plain ints; what a device does is the executor's, what HTTP says the API's.
"""
