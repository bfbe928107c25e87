"""What a model's text says besides text: tool calls and reasoning, from text as it comes. Pure: no
tokens, no requests, no JSON bodies.
"""
