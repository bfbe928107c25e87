"""APIs other than OpenAI's, a shelf: nothing outside this folder imports it, and without the folder
the worker serves the other routes.

A dialect turns its body into the chat request or text completion that it stands for, and the frames
of those back into its own. Its module has the table `ROUTES` and the function `handlers`.
"""

MODULES = ("batch", "responses", "messages", "sglang", "render", "derender")
