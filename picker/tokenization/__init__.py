"""Tokenizes prompts without a tokenizer: estimates for text and media, and the requests and answers
of vLLM's render routes. Pure; the HTTP client of those routes belongs to the plugin that uses it.
"""
