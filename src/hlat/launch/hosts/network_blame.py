"""Find the hosts to blame when hosts do not reach each other.

pairs that fail, links that are down --blame_network--> hosts whose network fails, and why in words
"""

from collections.abc import Mapping, Sequence

from hlat.launch.hosts.records import HostMember, HostStatus

_LISTED = 6  # pairs in a message, at most


def blame_network(
    members: Sequence[HostMember], statuses: Mapping[int, HostStatus], seconds: float
) -> tuple[list[HostMember], str] | None:
    """Return the hosts that have lost their network, and the reason; None if all reach each other.

    A host whose link is down is to blame. Else it is the one that takes part in the most failing pairs; hosts that
    share the first place have lost the network between them.

    Args:
        members: hosts of the attempt.
        statuses: newest status of each, by index.
        seconds: a pair fails if one side has not reached the other for so long.
    """
    by_index = {member.index: member for member in members}
    pairs = {
        frozenset((index, int(other)))
        for index, status in statuses.items()
        for other, since in status.unreachable.items()
        if since > seconds and index in by_index and int(other) in by_index
    }
    if not pairs:
        return None
    down = [by_index[index] for index, status in sorted(statuses.items()) if index in by_index and status.link]
    if down:
        return down, "; ".join(f"{member.describe()}: {statuses[member.index].link}" for member in down)
    counts = {index: sum(index in pair for pair in pairs) for index in sorted(by_index)}
    most = max(counts.values())
    blamed = [by_index[index] for index, count in counts.items() if count == most]
    if len(blamed) == 1:
        others = sorted(by_index[index].name for pair in pairs for index in pair if index != blamed[0].index)
        return blamed, f"{blamed[0].describe()} cannot be reached over the network from {', '.join(others[:_LISTED])}"
    named = sorted(" and ".join(sorted(by_index[index].name for index in pair)) for pair in pairs)
    return blamed, f"hosts do not reach each other over the network: {'; '.join(named[:_LISTED])}"
