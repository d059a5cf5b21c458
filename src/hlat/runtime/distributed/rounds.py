"""Agreement on the round of a rendezvous, in a store that outlives the processes, as torchrun's does.

    rank r: "which round?" --> the store --> rank 0, while it waits for the others: the round that it has drawn

torchrun keeps one store for all restarts. Keys of an earlier attempt are still in it, and the number of restarts that
torchrun tells each process cannot separate them: it is counted per host, and differs if one host's processes failed and
another's were only told to restart. So each process asks, and only a rank 0 that is alive answers. Questions of
processes that have ended are answered too, which does no harm.
"""

import secrets
import time

from torch._C._distributed_c10d import PrefixStore, Store

from hlat.runtime.distributed.signed_store import put_bytes

_QUESTIONS, _ANSWERED = "questions", "answered"


class RoundAnswers:
    """Answers of rank 0.

    Args:
        server: the store.
    """

    def __init__(self, server: Store) -> None:
        self._store = PrefixStore("hlat/rounds", server)
        self.round = secrets.token_hex(8)

    def answer(self) -> None:
        """Answer the questions that nobody has answered yet."""
        asked, done = self._store.add(_QUESTIONS, 0), self._store.add(_ANSWERED, 0)
        for number in range(done + 1, asked + 1):
            put_bytes(self._store, f"round/{number}", self.round.encode())
        if asked > done:
            self._store.add(_ANSWERED, asked - done)


def ask_for_round(server: Store, seconds: float) -> str | None:
    """Ask rank 0 for the round of this attempt; return None if it has not answered in time.

    Args:
        server: the store.
        seconds: time to wait.
    """
    store = PrefixStore("hlat/rounds", server)
    key, deadline = f"round/{store.add(_QUESTIONS, 1)}", time.monotonic() + seconds
    while not store.check([key]):  # in short steps, so that signals are handled
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return store.get(key).decode("ascii", "replace")
