"""Host-only planning: a problem in, the stages to run and the reasons out."""

from moegraft.plan.select import Plan, make_plan

__all__ = ["Plan", "make_plan"]
