"""Order the requests of one flow (`framework.flow.OrderingPolicy`)."""
