"""Execution of programs that a model wrote, confined, and pass@k."""
