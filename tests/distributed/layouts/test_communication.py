"""The messages of a step are those counted in the literature, plus those explained in ``textbook.py``.

Multisets are compared: each kind and size of message occurs as often as expected, and no others.
"""

import pytest

from tests.support.distributed.textbook import expected, table, total
from tests.support.distributed.traffic import ROWS, Row, count
from tests.support.distributed.workers import Pool


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_messages_of_a_step_equal_those_expected(row: Row, pool: Pool) -> None:
    counted = pool.run(row.world, count, row.content)
    wanted = [expected(row.recipe, row.world, rank) for rank in range(row.world)]
    print(table({row.name: list(zip(counted, wanted, strict=True))}))
    for rank, (traffic, messages) in enumerate(zip(counted, wanted, strict=True)):
        assert dict(traffic) == dict(total(messages)), f"rank {rank}"
