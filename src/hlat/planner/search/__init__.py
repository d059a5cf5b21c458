"""The search for the best layout, the tie rule, and suggestions when nothing fits."""
