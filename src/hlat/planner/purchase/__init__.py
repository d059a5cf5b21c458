"""Size of a cluster for a goal: the smallest that meets a deadline, the fastest within a budget, or the knee.

model, kinds of instances, goal --choose_cluster--> Purchase: a row for each kind, and the counts of the chosen one
model, budget --afford--> Purchase with as many tokens as the budget pays for
budget --choose_model_size--> ModelSize: a model, its tokens and its run
"""
