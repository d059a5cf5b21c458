"""Checks between the fields of a recipe, and the nearest values that would pass them."""
