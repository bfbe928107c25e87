"""Policies that choose among the flows of a priority band (`framework.flow.FairnessPolicy`)."""
