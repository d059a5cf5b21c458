"""A first recipe for a folder of text and the machine at hand, with the reason of every number.

sources.py   paths and mixed folders as sources of one format each
facts.py     what the corpus and the machine are: files, column, size, tokens; devices, peak, memory
drafting.py  model, tokens, batch and learning rate for both; the recipe as commented YAML
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.draft.drafting import *
    from hlat.draft.facts import *

__getattr__ = lazily(
    __name__,
    {
        "drafting": "draft_recipe time_text",
        "facts": "look_at_machine reached",
    },
)
