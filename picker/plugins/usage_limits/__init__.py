"""How full the pool may be for each priority (`framework.flow.UsageLimitPolicy`)."""
