"""Check that all processes of a run are about to do the same thing.

facts (recipe, code, data: field -> value) --8-byte hash--> all-gather --equal?--> continue
                                           --differ: one rank per hash sends its values--> error everywhere

Processes that disagree do not fail by themselves: they deadlock, or train something that nobody asked for.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hlat.runtime.distributed.host_collectives import HostGroup, format_ranks
from hlat.runtime.errors import LaunchError
from hlat.runtime.version import hlat_version

Facts = Mapping[str, Mapping[str, Any]]
"""Section (recipe, code, data) -> item -> JSON value."""

_ABSENT = "not set"
_MAX_SHOWN = 20  # maximum number of differing items in a message


def check_consistent(ranks: HostGroup, facts: Facts) -> None:
    """Compare facts about the run across ranks. Collective; exchanges 8 bytes per rank if all agree.

    Args:
        ranks: all processes of the run.
        facts: values that must be equal on all ranks: section -> item -> JSON value.

    Raises:
        LaunchError: they differ. Every rank raises the same error, with each differing item and its values by rank.
    """
    if ranks.world == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    own = hashlib.blake2b(text.encode(), digest_size=8).digest()
    hashes = ranks.all_gather(own)
    if len(set(hashes)) == 1:
        return
    senders = {found: hashes.index(found) for found in hashes}  # one rank per distinct hash sends its values
    texts = ranks.all_gather(text if senders[own] == ranks.rank else None)
    kinds = {rank: json.loads(texts[rank] or "{}") for rank in senders.values()}
    members = {rank: [member for member, found in enumerate(hashes) if senders[found] == rank] for rank in kinds}
    raise LaunchError(_disagreement(kinds, members))


def _disagreement(kinds: dict[int, dict[str, dict[str, Any]]], members: dict[int, list[int]]) -> str:
    items = {(section, item): None for kind in kinds.values() for section in kind for item in kind[section]}
    lines = []
    for section, item in items:
        values: dict[str, list[int]] = {}
        for rank, kind in kinds.items():
            values.setdefault(_shown(kind.get(section, {}), item), []).extend(members[rank])
        if len(values) > 1:
            holders = ", ".join(f"{value} on {format_ranks(sorted(found))}" for value, found in values.items())
            lines.append(f"  {section}: {item} is {holders}")
    head = "the processes of this run were started differently:"
    more = [f"  and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    remedy = "Start all of them from the same recipe, overrides, data and installation."
    return "\n".join([head, *lines[:_MAX_SHOWN], *more, remedy])


def _shown(items: Mapping[str, Any], item: str) -> str:
    return _ABSENT if item not in items else json.dumps(items[item], ensure_ascii=False)


@cache
def code_identity() -> dict[str, str]:
    """Identify the code of this process: a hash of hlat's source files, and the versions of hlat, torch and Python."""
    return {
        "source": _source_hash(Path(__file__).parents[2]),
        "hlat": hlat_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _source_hash(package: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.[ch]")]):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
