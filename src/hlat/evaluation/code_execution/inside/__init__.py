"""Code that runs inside the sandbox, with the standard library only: ``python -I -S``, where hlat is not installed.

judge (confines itself, forks) --calls--> program (what the model wrote) --values--> judge (the tests) --> verdict
"""

from .confine import NOBODY, others_can_read
from .values import frame, to_bytes

__all__ = ["NOBODY", "frame", "others_can_read", "to_bytes"]
