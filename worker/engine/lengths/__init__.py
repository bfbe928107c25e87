"""The number of drafts that a step verifies and makes: goodput, acceptance, costs and worths.

Drafters and the running of steps are elsewhere.
"""
