"""Whether all processes of a run are about to do the same thing.

what (recipe, code, data: field -> value) --8-byte hash--> all-gather --equal?--> go on
                                          --where it differs: the values of each kind of rank--> one error on all ranks

Processes that disagree do not fail: they wait for each other for ever, or train something that nobody asked for.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hlat.runtime.distributed.host_collectives import HostGroup, format_ranks
from hlat.runtime.errors import LaunchError

Facts = Mapping[str, Mapping[str, Any]]
"""Section (recipe, code, data) -> item -> JSON value."""

_ABSENT = "not there"
_SHOWN = 20  # differing items that a message lists; one wrong recipe may differ in all of them


def check_consistent(ranks: HostGroup, what: Facts) -> None:
    """Compare what the ranks are about to do. Collective; 8 bytes per rank where all agree.

    Args:
        ranks: the processes.
        what: by section, what has to be the same on all of them, as JSON values.

    Raises:
        LaunchError: they differ. The same error on every rank: each item that differs, who has which value.
    """
    if ranks.world == 1:
        return
    text = json.dumps(what, sort_keys=True)
    own = hashlib.blake2b(text.encode(), digest_size=8).digest()
    hashes = ranks.all_gather(own)
    if len(set(hashes)) == 1:
        return
    speakers = {found: hashes.index(found) for found in hashes}  # one rank of each kind tells what it has
    told = ranks.all_gather(text if speakers[own] == ranks.rank else None)
    kinds = {rank: json.loads(told[rank] or "{}") for rank in speakers.values()}
    members = {rank: [member for member, found in enumerate(hashes) if speakers[found] == rank] for rank in kinds}
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
    head = "the processes of this run do not agree on what to do:"
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    remedy = "Start all of them from the same recipe, overrides, data and installation."
    return "\n".join([head, *lines[:_SHOWN], *more, remedy])


def _shown(items: Mapping[str, Any], item: str) -> str:
    return _ABSENT if item not in items else json.dumps(items[item], ensure_ascii=False)


@cache
def code_identity() -> dict[str, str]:
    """What this process runs: a hash over hlat's source files, and the versions of hlat, torch and Python."""
    return {
        "source": _source_hash(Path(__file__).parents[2]),
        "hlat": _version("hlat"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _source_hash(package: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "not installed"
