"""From a checked body to the last token of its answer: admission, preparation, the run on the
engine, and the text, log probabilities and frames that go out. No route and no socket.
"""
