"""Load a tokenizer of any kind from its files, and measure what it loses of a text.

    tokenizer.json         --> json_tokenizer.py   (Hugging Face ``tokenizers``)
    SentencePiece .model   --> sentencepiece.py    (extra ``sentencepiece``, imported only for such a file)

    sample --encode, decode--> the same text, or: share of its bytes that are lost, share of unknown tokens, an example

A byte-level tokenizer loses nothing. Others lower-case, strip accents, join spaces, or drop what they do not know.
``check_export`` compares a tokenizer with its exported file.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.char_tokenizer import read_json_tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.storage.hub import TOKENIZER_FILES, HubError, HubModel
from hlat.runtime.storage.local_files import read_small_file, recognize

_PIECES, _CHARS = 48, 300  # comparing two texts takes time that grows with the square of their length
_EXAMPLE_CONTEXT = 12  # characters of an example around the first difference


class RoundTripLoss(NamedTuple):
    """Loss of a sample of texts that was encoded and decoded."""

    lost: float  # share of its bytes that do not come back
    unknown: float  # share of its tokens that stand for unknown text
    differing: float  # share of its pieces that the library which made the tokenizer gives other ids
    example: tuple[str, str]  # (text, text that comes back), shortened; empty if nothing is lost


def check_export(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Check that the exported tokenizer.json gives texts the ids of training; DataError if not."""
    exported = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    exported.no_truncation()
    exported.no_padding()
    exported.encode_special_tokens = True
    for piece in _pieces(texts):
        try:
            ids = tokenizer.encode(piece)
        except DataError:  # of a text that has no ids, there are none to compare
            continue
        if exported.encode(piece, add_special_tokens=False).ids != ids:
            raise DataError(
                f"an exported model would read {piece[:40]!r} as other ids than in training. Report this with the "
                "tokenizer, and give a tokenizer.json, or data.tokenizer.path=null to train one."
            )


def measure_loss(tokenizer: Tokenizer, texts: Sequence[str]) -> RoundTripLoss:
    """Encode and decode a sample of texts, and compare; DataError if a text cannot be encoded."""
    total, kept, tokens, unknown, example = 0, 0, 0, 0, ("", "")
    differing = list[bool]()  # by piece
    for piece in _pieces(texts):
        ids = tokenizer.encode(piece)
        back, size = tokenizer.decode(ids), len(piece.encode())
        total, tokens = total + size, tokens + len(ids)
        differing.append(tokenizer.encode_by_origin(piece) != ids)
        unknown += 0 if tokenizer.unknown_id is None else ids.count(tokenizer.unknown_id)
        if back == piece:
            kept += size
            continue
        blocks = SequenceMatcher(None, piece, back, autojunk=False).get_matching_blocks()
        same = sum(len(piece[block.a : block.a + block.size].encode()) for block in blocks)
        kept += same
        if not example[0] and same < size:
            example = _around_difference(piece, back)
    lost = 1 - kept / total if total else 0.0
    return RoundTripLoss(lost, unknown / max(tokens, 1), sum(differing) / max(len(differing), 1), example)


def vocabulary_texts(tokenizer: Tokenizer) -> list[str]:
    """Return what evenly spread tokens of the vocabulary spell, to check an export where there is no corpus."""
    step = -(-tokenizer.vocab_size // _PIECES)
    ends = [(start, min(start + 16, tokenizer.vocab_size)) for start in range(0, tokenizer.vocab_size, step)]
    return [tokenizer.decode(range(start, end)) for start, end in ends]


def describe_tokenizer(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[str, str] | None:
    """Return what a user should know of a tokenizer before training, and what would work; None for nothing.

    ``texts`` are a sample of the corpus. DataError of ``measure_loss`` and ``check_export``.
    """
    check_export(tokenizer, texts)
    loss, said, remedy = measure_loss(tokenizer, texts), list[str](), ""
    if tokenizer.left_out:
        verb = "is" if len(tokenizer.left_out) == 1 else "are"
        said.append(f"{' and '.join(tokenizer.left_out)} {verb} not used")
    if loss.differing:
        said.append(
            f"{_share(loss.differing)} of the sample's pieces get other ids from the library of this tokenizer; in "
            "training and in an export they get those of its tokenizer.json"
        )
    if loss.lost:
        before, after = loss.example
        unknown = f", {_share(loss.unknown)} of its tokens are unknown text" if loss.unknown else ""
        said.append(
            f"{_share(loss.lost)} of the text is lost in its tokens, as in {before!r}, which comes back as {after!r}"
            f"{unknown} (measured on a sample)"
        )
        remedy = "A byte-level tokenizer with all 256 bytes loses nothing; data.tokenizer.path=null trains one."
    return (f"data.tokenizer.path: {'; '.join(said)}.", remedy) if said else None


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _pieces(texts: Sequence[str]) -> Iterator[str]:
    """Yield beginning, middle and end of evenly spread texts."""
    pieces = []
    for text in texts:
        starts = sorted({0, max(0, len(text) // 2 - _CHARS // 2), max(0, len(text) - _CHARS)})
        pieces += [text[start : start + _CHARS].encode(errors="ignore").decode() for start in starts]
    yield from pieces[:: max(1, -(-len(pieces) // _PIECES))]


def _around_difference(text: str, back: str) -> tuple[str, str]:
    """Cut a text and what comes back to where they first differ."""
    same = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    start = max(0, same - _EXAMPLE_CONTEXT)
    return text[start : same + 2 * _EXAMPLE_CONTEXT], back[start : same + 2 * _EXAMPLE_CONTEXT]


_TOKENIZER_FILE_NAMES = ("tokenizer.json", "tokenizer.model")
_LARGEST_CONFIG = 1 << 26  # bytes; published ones with many reserved tokens have more than a megabyte


def load_tokenizer(path: str | Path, eos_token: str | None = "auto") -> Tokenizer:
    """Load a tokenizer from a tokenizer.json, a SentencePiece .model, or a folder that contains one of them.

    ``path`` may also be the id of a model of the Hugging Face Hub, whose tokenizer is downloaded once. ``eos_token`` is
    the name of the end-of-sequence token; "auto" for the tokenizer's own; None for none.

    Raises:
        DataError: the tokenizer is missing, unreadable, has no such token, or cannot be exported.
    """
    path = _local_path(path)
    try:
        file = _tokenizer_file(path)
        content = file.read_bytes().removeprefix(BOM_UTF8)
        if found := recognize(content):
            raise DataError(f"{file}: this is {found.what}. {found.remedy}")
        config_file = file.with_name("tokenizer_config.json")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error}") from error
    config = _read_config(config_file) if file.name in _TOKENIZER_FILE_NAMES and config_file.is_file() else None
    if file.suffix == ".model":
        from hlat.data.tokenizers.sentencepiece import SentencePieceTokenizer  # noqa: PLC0415 - an extra

        return SentencePieceTokenizer(content, config, eos_token, str(file))
    if not content:
        raise DataError(f"{file}: the tokenizer file is empty")
    return read_json_tokenizer(content, config, eos_token, str(file))


def load_saved(folder: Path) -> Tokenizer:
    """Load the tokenizer that ``Tokenizer.save`` wrote; errors of ``load_tokenizer``."""
    model = folder / "tokenizer.model"
    # The model before its tokenizer.json, which is its conversion.
    return load_tokenizer(model if model.is_file() else folder)


def _local_path(path: str | Path) -> Path:
    hub = HubModel.parse(str(path))
    if hub is None:
        return Path(local_path(path))
    try:
        return hub.snapshot(TOKENIZER_FILES)
    except HubError as error:
        raise DataError(f"data.tokenizer.path {path}: {error}. Or set it to null to train a tokenizer.") from error


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        found = [path / name for name in _TOKENIZER_FILE_NAMES if (path / name).is_file()]
        if not found:
            raise DataError(
                f"{path}: no tokenizer here: expected {' or '.join(_TOKENIZER_FILE_NAMES)} in it. "
                "Name another, or null to train one."
            )
        return found[0]
    if not path.is_file():
        raise DataError(
            f"{path}: no such tokenizer.{_hub_advice(path)} Check data.tokenizer.path, or set it to null to train one."
        )
    if path.suffix not in (".json", ".model"):
        raise DataError(f"{path}: not a tokenizer: expected tokenizer.json, a SentencePiece .model, or their folder")
    return path


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_small_file(file, _LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: cannot read the tokenizer's configuration: {error}. Restore it, or remove it."
        ) from error
    if not isinstance(config, dict):
        raise DataError(f"{file}: a JSON {type(config).__name__}, not an object. Restore the file, or remove it.")
    return config


def _hub_advice(path: Path) -> str:
    """Return how a model of the Hugging Face Hub is named, if this may be meant as one."""
    # The id of a model has an owner; a single name lacks it.
    if path.suffix or path.is_absolute() or len(path.parts) > 1:
        return ""
    return (
        f" If it is a model of the Hugging Face Hub, its id has an owner, as in openai-community/{path}; for a machine "
        "without network, name a folder made with `hf download OWNER/MODEL --local-dir FOLDER`."
    )
