"""How many drafts a step verifies and makes: goodput, acceptance rates, step costs and worths.

What drafts are (drafters), and how steps run, belong elsewhere.
"""
