"""The picker's series and the bounds on their labels; nothing here reads a request or a decision.

`families` has the series of each room and `picker_metrics` all others, in the notation of
`declarations`; `label_caps` bounds label values.
"""
