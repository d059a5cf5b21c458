"""Scoring: log-probabilities of continuations after contexts, with shared prefixes computed once."""
