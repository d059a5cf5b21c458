"""Inputs of a plan: the request (model, cluster, training budget) and the candidate layouts."""
