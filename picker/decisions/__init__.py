"""The decision as one value, the ring behind `explain`, and the views of a decision for users.

`steps` are calls of plugins, `decision` collects them. `ring` stores decisions, as `packing` packs
them; `showing` turns one into `views`, with sentences.
"""
