"""APIs other than OpenAI's. Nothing outside imports this folder: the worker runs without it.

A dialect turns the body of a request into the chat request or text completion that it stands for,
and the frames of the answer back into its own. Its module has `ROUTES`, a table, and `handlers`.
"""

MODULES = ("batch", "responses", "messages", "sglang", "render", "derender")
