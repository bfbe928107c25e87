"""Tokenizes prompts without its own tokenizer: by estimates, or by vLLM's render routes. Pure."""
