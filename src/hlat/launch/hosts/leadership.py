"""Election of the leader: the living host with the lowest index, once no leader is alive.

    no leader alive --claim--> term-00002 created by one host only (O_EXCL) --> that host leads
    a leader that was stopped and goes on sees a later term --> it leads no longer

A file that only one host can create decides, not a vote: the shared folder is there, and hosts that do not see it
cannot take part in the run.
"""

import os
from contextlib import suppress
from pathlib import Path

from hlat.launch.hosts.host_table import HostTable
from hlat.launch.hosts.records import Orders


class NotLeaderError(Exception):
    """This host leads no longer: another one has taken over."""


def newest_term(folder: Path) -> int:
    """Return the number of the newest leadership; 0 if there was none."""
    terms = [path.name.removeprefix("term-") for path in folder.glob("term-*")]
    return max((int(term) for term in terms if term.isdecimal()), default=0)


def claim(folder: Path, term: int) -> bool:
    """Become the leader of a term; return False if another host has.

    Raises:
        OSError: the shared disk refuses it.
    """
    with suppress(FileExistsError):
        os.close(os.open(folder / f"term-{term:05d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for path in folder.glob("term-*"):  # of earlier launches and leaders; the newest one must remain
            number = path.name.removeprefix("term-")
            if number.isdecimal() and int(number) < term - 1:
                path.unlink(missing_ok=True)
        return True
    return False


def leader_is_alive(orders: Orders | None, table: HostTable, patience: float) -> bool:
    """Return True if the host whose orders these are has shown a sign of life within ``patience`` seconds."""
    if orders is None:
        return False
    status = table.living(patience).get(orders.leader)
    return status is not None and status.incarnation == orders.incarnation
