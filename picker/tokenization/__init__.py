"""The tokens of prompts without a tokenizer: estimates of texts and media, and the prompts that
render routes return. Pure; a client that asks a route belongs to the plugin that does.
"""
