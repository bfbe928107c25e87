"""Text to token ids and back, and chat messages to prompts: tokenizers, their files, templates.

Nothing here knows requests or the engine, and nothing imports torch.
"""
