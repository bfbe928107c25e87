"""The scheduler. It knows no feature by name: those attach to it (`features.interface`).

scheduler    the next step, and the state that all others work on
admission    which waiting sequences join the step
results      what the results of a step do to its sequences
"""
