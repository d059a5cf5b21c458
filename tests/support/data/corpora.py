"""Small corpora for the tests of the data room, generated from a seed."""

import json
import random
from pathlib import Path

_SYLLABLES = ["ka", "lo", "mi", "ta", "re", "su", "no", "ve", "ti", "an", "or", "el", "ü", "日本"]


def prose(seed: int, size: int) -> str:
    """Generate ``size`` characters of artificial sentences with punctuation, digits, line breaks and some non-ASCII."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(2000)]
    words: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(vocabulary) + rng.choice(
            ["", "", "", ",", ".", "!\n", "'s", f" {rng.randint(0, 9999)}", "  "]
        )
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


def documents(count: int, size: int, seed: int = 0) -> list[str]:
    """Generate documents of different lengths, ``size`` characters on average."""
    rng = random.Random(seed)
    text = prose(seed, 2 * size * count)
    out, start = [], 0
    for _ in range(count):
        length = rng.randint(size // 2, 3 * size // 2)
        out.append(text[start : start + length])
        start += length
    return out


def write_jsonl(path: Path, texts: list[str | None], key: str = "text") -> Path:
    """Write the texts to a jsonl file; return its path."""
    path.write_text("".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def tree(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder; return the content by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
