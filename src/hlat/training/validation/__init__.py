"""Evaluation of weights while training: loss on fixed sequences, and scores of tasks, in any parallel layout."""
