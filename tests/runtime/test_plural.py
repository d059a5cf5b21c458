"""Counts of things: "1 thread", never "1 threads"."""

import pytest
import torch

from hlat.runtime.backend.table import backend_of
from hlat.runtime.terminal import plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "host", "1 host"),
        (0, "host", "0 hosts"),
        (2, "host", "2 hosts"),
        (1, "process", "1 process"),
        (1200, "process", "1,200 processes"),
        (3, "copy", "3 copies"),
        (1, "copy", "1 copy"),
    ],
)
def test_a_count_and_its_noun_agree(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_one_thread_is_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert backend_of("cpu").describe(torch.device("cpu")) == "cpu (1 thread)"
