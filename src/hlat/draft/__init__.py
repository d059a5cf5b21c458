"""A first recipe for a folder of text and the machine at hand, with the reason of every number.

texts.py     what the corpus is: files, column, size, tokens
machine.py   what the machine is: devices, peak, memory
sizes.py     model, tokens, batch and learning rate for both
document.py  the recipe as commented YAML
"""

from hlat.draft.drafting import draft_recipe

__all__ = ["draft_recipe"]
