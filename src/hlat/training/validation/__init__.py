"""Validation while training: losses of held-out sets, scores of tasks, continued prompts."""
