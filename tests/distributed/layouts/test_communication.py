"""Every message of a step is one that the literature counts, or one that is explained in ``textbook.py``.

The comparison is of multisets: each kind and size of message, as often as expected, and nothing else.
"""

import pytest

from tests.support.distributed.textbook import expected, table, total
from tests.support.distributed.traffic import ROWS, Row, count
from tests.support.distributed.workers import Pool


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_messages_of_a_step(row: Row, pool: Pool) -> None:
    counted = pool.run(row.world, count, row.content)
    wanted = [expected(row.recipe, row.world, rank) for rank in range(row.world)]
    print(table({row.name: list(zip(counted, wanted, strict=True))}))
    for rank, (traffic, messages) in enumerate(zip(counted, wanted, strict=True)):
        assert dict(traffic) == dict(total(messages)), f"rank {rank}"
