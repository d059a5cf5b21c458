"""A first recipe for a folder of text and the machine at hand, with the reason of every number.

texts.py     what the corpus is: files, column, size, tokens
machine.py   what the machine is: devices, peak, memory
sizes.py     model, tokens, batch and learning rate for both
document.py  the recipe as commented YAML
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.draft.drafting import draft_recipe as draft_recipe

__getattr__ = lazily(
    __name__,
    {
        "drafting": "draft_recipe",
    },
)
