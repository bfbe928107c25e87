"""The handlers behind the table of routes: `generation`, `tokenization`, `probes`, `control`; and
the prefill leg of a disaggregated request.
"""
