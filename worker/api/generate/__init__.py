"""The processing of a prepared request: admission, the run on the engine, and the text, log
probabilities and frames that come of it. Nothing here knows routes or sockets.

`text` renders and encodes prompts, `answer_plans` chooses parsers and constraints, `prepared` is
the checked request. `runner` runs it: `choice` reads one sequence, `response` collects them,
`frames` and `logprobs` write them; `open_sequences` lists them, `resumption` lets a stream continue
elsewhere. `adapters` has the names of models, `engine` is the interface to the engine.
"""
