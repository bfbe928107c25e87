"""The record of one decision, the ring behind `explain`, and the views of a decision for users.

`steps` records the calls of plugins, and `decision` collects them. `ring` stores decisions in the
form that `packing` gives them; `showing` turns one into `views`, with explaining sentences.
"""
