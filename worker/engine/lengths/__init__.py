"""The number of drafts that a step verifies and makes: goodput, acceptance, costs and worths."""
