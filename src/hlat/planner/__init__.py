"""What a run will take before it is started: memory, time, money, and the layout that takes least of them."""

from hlat.planner.arithmetic import executed_flops
from hlat.planner.comparison import RankBy, as_json, common_price, compared, front_of, ranked
from hlat.planner.explain import against, explain
from hlat.planner.layouts import Candidate, parse_layout
from hlat.planner.memory import RankMemory, rank_memory
from hlat.planner.page import page
from hlat.planner.plan import Plan, described, fits, fragment, plan, short
from hlat.planner.question import Question, ask
from hlat.planner.search import Planned, planned
from hlat.planner.trace import chrome_trace
from hlat.planner.validation import validate
from hlat.planner.volume import exchanged_bytes

__all__ = [
    "Candidate",
    "Plan",
    "Planned",
    "Question",
    "RankBy",
    "RankMemory",
    "against",
    "as_json",
    "ask",
    "chrome_trace",
    "common_price",
    "compared",
    "described",
    "exchanged_bytes",
    "executed_flops",
    "explain",
    "fits",
    "fragment",
    "front_of",
    "page",
    "parse_layout",
    "plan",
    "planned",
    "rank_memory",
    "ranked",
    "short",
    "validate",
]
