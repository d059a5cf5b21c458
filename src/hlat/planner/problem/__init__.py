"""Inputs of a plan: a user's question, the request that it is on one cluster, and the candidate layouts."""
