"""Small corpora for the tests of the data room, made on the spot from a seed."""

import json
import random
from pathlib import Path

_SYLLABLES = ["ka", "lo", "mi", "ta", "re", "su", "no", "ve", "ti", "an", "or", "el", "ü", "日本"]


def prose(seed: int, size: int) -> str:
    """About ``size`` characters of made-up sentences with punctuation, digits, line breaks and some non-ASCII."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(2000)]
    parts: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(vocabulary) + rng.choice(
            ["", "", "", ",", ".", "!\n", "'s", f" {rng.randint(0, 9999)}", "  "]
        )
        parts.append(word)
        length += len(word) + 1
    return " ".join(parts)[:size]


def documents(count: int, size: int, seed: int = 0) -> list[str]:
    """Documents of different lengths, ``size`` characters on average."""
    rng = random.Random(seed)
    text = prose(seed, 2 * size * count)
    out, place = [], 0
    for _ in range(count):
        length = rng.randint(size // 2, 3 * size // 2)
        out.append(text[place : place + length])
        place += length
    return out


def write_jsonl(path: Path, texts: list[str | None], key: str = "text") -> Path:
    """A jsonl file of the texts."""
    path.write_text("".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
