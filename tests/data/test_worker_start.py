"""A worker process ends without a word when its parent goes away while the worker still starts."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("program", ["hlat.data.prepare.worker", "hlat.data.online.worker"])
@pytest.mark.parametrize("sent", [b"", b'{"tokenizer": "/some', json.dumps({"tokenizer": "/none"}).encode()])
def test_a_parent_that_is_gone_before_the_settings_came_is_no_error(program, sent):
    """Ctrl-C while the worker still imports closes its stdin; its traceback would hide the message of the parent."""
    command = [sys.executable, "-P", "-m", program]
    ended = subprocess.run(command, input=sent, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
