"""The best layouts of a question, how ties are broken, and what else would fit."""

from hlat.planner.search.plan import Plan, described, fits, fragment, plan, short
from hlat.planner.search.search import Planned, planned, timeline
from hlat.planner.search.tie_break import TIE

__all__ = ["TIE", "Plan", "Planned", "described", "fits", "fragment", "plan", "planned", "short", "timeline"]
