"""The sections of a recipe: one pydantic model each, one sentence per field."""
