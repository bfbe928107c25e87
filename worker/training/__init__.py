"""Training of draft heads (`pointsman train-draft`): text, a trainable head, its files.

Nothing that serves imports this; a trained head is loaded by `models.draft_head`.
"""
