"""Training of draft heads (`pointsman train-draft`): a shelf that no serving room imports.

`pipeline` is a whole run. `conversations` and `writing` make text, `dataset` batches it, `twin` is
the trainable head, `objective` its loss and its measure, `trainer` the gradient descent, `store`
the files. `models.draft_head` loads a trained head.
"""
