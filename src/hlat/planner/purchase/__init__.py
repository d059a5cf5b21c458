"""Size of a cluster for a goal: the smallest that meets a deadline, the fastest within a budget, or the knee.

model, kinds of instances, goal --choose_cluster--> Purchase: a row for each kind, and the counts of the chosen one
model, budget --afford--> Purchase with as many tokens as the budget pays for
budget --choose_model_size--> ModelSize: a model, its tokens and its run
"""

from hlat.planner.purchase.afford import afford
from hlat.planner.purchase.choice import Purchase, choose_cluster
from hlat.planner.purchase.goal import parse_goal
from hlat.planner.purchase.model_size import ModelSize, RequestOf, choose_model_size
from hlat.planner.purchase.offers import Offer
from hlat.planner.purchase.scaling_law import CHINCHILLA
from hlat.planner.purchase.table import model_size_json, model_size_lines, purchase_json, purchase_lines

__all__ = [
    "CHINCHILLA",
    "ModelSize",
    "Offer",
    "Purchase",
    "RequestOf",
    "afford",
    "choose_cluster",
    "choose_model_size",
    "model_size_json",
    "model_size_lines",
    "parse_goal",
    "purchase_json",
    "purchase_lines",
]
