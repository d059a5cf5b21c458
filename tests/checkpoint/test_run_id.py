"""The id of a run: drawn once, and never guessed from a damaged file."""

import pytest

from hlat.checkpoint.run_id import RunId
from hlat.runtime.errors import CheckpointError


def test_an_id_is_drawn_once_and_a_damaged_one_is_an_error_that_names_the_file(tmp_path):
    run_id = RunId(tmp_path, "name")
    assert run_id.stored() is None
    drawn = run_id.ensure()
    assert RunId(tmp_path, "name").ensure() == drawn and len(bytes.fromhex(drawn)) == 16
    (tmp_path / ".run-id").write_bytes(b"ab\x00\xc5\xff")
    with pytest.raises(CheckpointError, match=r"\.run-id: is damaged"):
        RunId(tmp_path, "name").ensure()
    assert (tmp_path / ".run-id").read_bytes() == b"ab\x00\xc5\xff", "nothing is lost"
