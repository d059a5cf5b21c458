"""Ladders: small models of a recipe's form, trained to foretell the large one; and the proof of its transfer rule.

coordinates.py  sizes of activations and of their changes in the first steps, over widths and depths
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.ladder.coordinates import *

__getattr__ = lazily(
    __name__, {"coordinates": "CoordinateTable STEPS WIDTHS coordinate_lines coordinate_table coordinates_json"}
)
