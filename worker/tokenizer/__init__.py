"""Tokenizers, their files, and chat templates: text to token ids and back, messages to prompts.

Nothing here knows requests or the engine, and nothing imports torch.
"""
