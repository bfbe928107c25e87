"""Which requests under way flow control may stop, and in which order."""
