"""Text to token ids and back, and chat messages to prompts: tokenizers, their files, templates.

Nothing here knows of requests or of the engine, and nothing imports torch.
"""
