"""Tokenizes prompts without a tokenizer: estimates, and vLLM's render routes. Pure."""
