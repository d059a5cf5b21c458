"""Size of a cluster for a goal: the smallest that meets a deadline, the fastest within a budget, or the knee.

model, kinds of instances, goal --choose_cluster--> Purchase: a row for each kind, and the counts of the chosen one
"""

from hlat.planner.purchase.choice import Purchase, choose_cluster
from hlat.planner.purchase.goal import parse_goal
from hlat.planner.purchase.table import purchase_json, purchase_lines

__all__ = ["Purchase", "choose_cluster", "parse_goal", "purchase_json", "purchase_lines"]
