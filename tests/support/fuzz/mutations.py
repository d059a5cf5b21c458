"""Random damage to a file: 16 kinds, each driven by a random generator, so that a seed identifies a case.

folder, random.Random --mutate--> one damaged file, and a description of the damage
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63, 2**70, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "many", "\0",
    "\ud800", "\x1b[31m", "../../x", "/dev/null", "x" * 5000, [], [[]], [1, "a", None], {}, {"a": {"b": []}},
]  # fmt: skip


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage one file of a folder.

    Returns:
        Path of the file and description of the damage.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    while True:
        path, kind = rng.choice(files), rng.choice(KINDS)
        if (damage := kind(path, rng, files)) is not None:
            return f"{path.relative_to(folder)}: {damage}"


def _flip(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    data = bytearray(path.read_bytes())
    if not data:
        return None
    offset, bit = rng.randrange(len(data)), rng.randrange(8)
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {offset} flipped"


def _flip_many(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    data = bytearray(path.read_bytes())
    for _ in range(min(20, len(data))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "20 bits flipped" if data else None


def _truncate(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    data = path.read_bytes()
    if not data:
        return None
    keep = rng.randrange(len(data))
    path.write_bytes(data[:keep])
    return f"{keep} bytes of {len(data)} left"


def _empty(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    path.write_bytes(b"")
    return "emptied"


def _zeros(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    """Zero the end of a file, as a file system may do in a crash."""
    data = bytearray(path.read_bytes())
    if not data:
        return None
    begin = rng.randrange(len(data))
    data[begin:] = bytes(len(data) - begin)
    path.write_bytes(data)
    return f"zeros from byte {begin} on"


def _garbage(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    path.write_bytes(rng.randbytes(rng.choice([1, 100, max(1, path.stat().st_size)])))
    return "garbage"


def _append(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    with path.open("ab") as file:
        file.write(rng.choice([b"\0", b"\n", b"{", rng.randbytes(100)]))
    return "bytes appended"


def _delete(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    path.unlink()
    return "deleted"


def _folder(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def _link_away(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    path.unlink()
    target = rng.choice(["/dev/null", "/nowhere", path.name])
    path.symlink_to(target)
    return f"a link to {target}"


def _link_aside(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    """Move the file, and put a link to it in its place."""
    moved = path.with_name(path.name + ".moved")
    path.rename(moved)
    path.symlink_to(moved)
    return "moved, and a link to it"


def _swap(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    other = rng.choice(files)
    own_content, other_content = path.read_bytes(), other.read_bytes()
    if own_content == other_content:
        return None
    path.write_bytes(other_content)
    other.write_bytes(own_content)
    return f"exchanged with {other.name}"


def _take(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    """Replace the file by one of the same name from another folder, as in a mixed-up copy."""
    others = [other for other in files if other.name == path.name and other.read_bytes() != path.read_bytes()]
    if not others:
        return None
    other = rng.choice(others)
    shutil.copyfile(other, path)
    return f"replaced by the file of {other.parent.name}"


def _nest(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    if path.suffix not in (".json", ".jsonl"):
        return None
    with path.open("a") as file:
        file.write("\n" + "[" * 100_000)
    return "a line of 100,000 brackets"


def _odd_line(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    """Change a value in one line of a log to another type."""
    if path.suffix != ".jsonl":
        return None
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    name = rng.choice(sorted(content))
    content[name] = odd = rng.choice(ODD_VALUES)
    lines[number] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return f"line {number}: {name} = {odd!r:.40}"


def _resealed(path: Path, rng: random.Random, files: list[Path]) -> str | None:
    """Change a value in a JSON file of a checkpoint to another type, and update the checksums."""
    sealed = [parent for parent in path.parents if (parent / "COMMITTED").is_file()]
    if path.suffix != ".json" or not sealed:
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    values = list(_values(content))
    holder, key = rng.choice(values)
    odd = rng.choice(ODD_VALUES)
    before = holder[key]
    holder[key] = odd
    path.write_text(json.dumps(content))
    if path.name != "manifest.json":
        manifest = json.loads((sealed[0] / "manifest.json").read_bytes())
        data = path.read_bytes()
        name = path.relative_to(sealed[0]).as_posix()
        manifest["files"][name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        (sealed[0] / "manifest.json").write_text(json.dumps(manifest))
    (sealed[0] / "COMMITTED").write_text(sha256((sealed[0] / "manifest.json").read_bytes()).hexdigest())
    return f"resealed with {key} = {odd!r:.40} for {before!r:.40}"


def _values(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value inside a JSON document, as its container and its key there."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield content, key
        if isinstance(value, dict | list):
            yield from _values(value)


KINDS: list[Callable[[Path, random.Random, list[Path]], str | None]] = [
    _flip, _flip, _flip_many, _truncate, _empty, _zeros, _garbage, _append, _delete, _folder, _link_away, _link_aside,
    _swap, _take, _nest, _odd_line, _resealed, _resealed, _resealed,
]  # fmt: skip
"""Kinds of damage. Those that apply to few files are listed several times, because most draws find no file for them."""
