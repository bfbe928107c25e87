"""The picker's series and the bounds on their labels; nothing here reads a request or a decision.

`picker_metrics` has all series, in the notation of `declarations`; `label_caps` bounds labels.
"""
