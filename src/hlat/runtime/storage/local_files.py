"""Local files: what a file is by its first bytes, the text of a small one, and files that are written whole.

    first bytes --recognize--> nothing known, or what the file is and what would work
    recipe, config.json, catalog --read_small_file--> text: a regular file, UTF-8, of limited size
    bytes --atomic_file, write_atomic--> temporary file --fsync--> --rename--> final name: complete, or absent
    file or folder --sync_to_disk--> it survives a power failure

The tables here are the only list of such bytes: readers of corpora, tokenizers and weights ask when content contradicts
a name. Pointers and error pages come first, since they are text and would be read as such.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

HEAD_BYTES = 1024  # bytes of a file that ``recognize`` looks at
_UNPACK = "Unpack it first."
_TABLE = "Convert it to parquet or jsonl, with the text in its own column."
_EXTRACT = "Extract its text first, or leave it out."
_NO_TEXT = "Leave it out."
_TORCH = (
    "Loading it can run code: where you trust it, write its tensors with safetensors.torch.save_file. Text or tokens "
    "in it belong into parquet or jsonl."
)
_OTHERWISE = "Decompress it first, or compress with gzip or zstd."
_COMPRESSED = "Give it the ending {0}, as in .jsonl{0}; what is compressed twice, decompress once."
_CONVERT = "Convert it: iconv -f {} -t UTF-8 FILE > NEW."
_AGAIN = "Fetch the file again, and check the address and the permission to read it."
_ZEROS = "It was reserved and never written, as by an interrupted download or copy: fetch or write it again."


class FileContent(NamedTuple):
    """Kind of content that a file turned out to have."""

    what: str  # a noun phrase, such as "gzip data"
    remedy: str  # a sentence that says what would work
    is_markup: bool = False  # True for a page of HTML or XML, which may be the text that is wanted


# These are text themselves, so each is known by more than a word that other text may begin with.
_TEXTS: tuple[tuple[str, str, re.Pattern[bytes]], ...] = (
    (
        "a Git LFS pointer, not the file itself",
        "Run `git lfs pull`.",
        re.compile(rb"version https://git-lfs\S*(?:\r?\n|$)"),
    ),
    ("a Xet pointer, not the file itself", "Download it from the Hub.", re.compile(rb"# xet version \d+\r?\n")),
    (
        "a git-annex pointer, not the file itself",
        "Run `git annex get` in its repository.",
        re.compile(rb"/annex/objects/[^\s/]+(?:\r?\n|$)"),
    ),
    (
        "a DVC pointer, not the file itself",
        "Run `dvc pull`, and name what it fetches.",
        re.compile(rb"outs:\r?\n- md5: "),
    ),
    ("a PDF", _EXTRACT, re.compile(rb"%PDF-\d\.\d\s*[\r\n]")),
    ("an RTF document", _EXTRACT, re.compile(rb"\{\\rtf\d*\s*[\\{]")),
)
# Text may begin with these words too: only control characters after them tell such files from it.
_WORDS: tuple[tuple[str, str, tuple[bytes, ...]], ...] = (
    ("bzip2 data", _OTHERWISE, tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))),
    ("a parquet file", "Give it the ending .parquet.", (b"PAR1",)),
    ("a Feather file of version 1", "Write it again with pyarrow.feather.write_feather.", (b"FEA1",)),
    ("an image", _NO_TEXT, (b"GIF87a", b"GIF89a")),
    ("a model of llama.cpp (GGUF)", _NO_TEXT, (b"GGUF",)),
)
_CONTROL = re.compile(rb"[^\t-\r\x1b -\xff]")
_KNOWN: tuple[tuple[str, str, tuple[bytes, ...]], ...] = (
    ("gzip data", _COMPRESSED.format(".gz"), (b"\x1f\x8b",)),
    ("zstd data", _COMPRESSED.format(".zst"), (b"\x28\xb5\x2f\xfd",)),
    ("xz data", _OTHERWISE, (b"\xfd7zXZ\0",)),
    ("lz4 data", _OTHERWISE, (b"\x04\x22\x4d\x18",)),
    ("snappy data", _OTHERWISE, (b"\xff\x06\0\0sNaPpY",)),
    ("data of compress (.Z)", _OTHERWISE, (b"\x1f\x9d",)),
    ("an Arrow file", "Give it the ending .arrow.", (b"ARROW1\0\0",)),
    ("weights of torch.save, a pickle", _TORCH, (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",)),  # before PyTorch 1.6
    ("a zip archive, or a document made of one (.docx, .xlsx, .epub, .npz)", _UNPACK, (b"PK\x03\x04", b"PK\x05\x06")),
    ("an archive of 7z", _UNPACK, (b"7z\xbc\xaf\x27\x1c",)),
    ("an archive of rar", _UNPACK, (b"Rar!\x1a\x07",)),
    ("an Avro file", _TABLE, (b"Obj\x01",)),
    ("an SQLite database", _TABLE, (b"SQLite format 3\0",)),
    ("an HDF5 file", _TABLE, (b"\x89HDF\r\n",)),
    ("an array of NumPy", _TABLE, (b"\x93NUMPY",)),
    ("a pickle of Python", _TABLE, (b"\x80\x04\x95", b"\x80\x05\x95")),
    ("an index of Megatron-LM", "Give it the ending .idx, beside its .bin.", (b"MMIDIDX\0",)),
    ("an OLE file (.doc, .xls, Thumbs.db)", _EXTRACT, (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",)),
    ("an image", _NO_TEXT, (b"\x89PNG\r\n", b"\xff\xd8\xff")),
    ("a program", _NO_TEXT, (b"\x7fELF",)),
    ("the AppleDouble half of another file", _NO_TEXT, (b"\0\x05\x16\x07",)),
    ("the .DS_Store of a folder", _NO_TEXT, (b"\0\0\0\x01Bud1",)),
    ("text in UTF-32, not in UTF-8", _CONVERT.format("UTF-32"), (b"\xff\xfe\0\0", b"\0\0\xfe\xff")),
    ("text in UTF-16, not in UTF-8", _CONVERT.format("UTF-16"), (b"\xff\xfe", b"\xfe\xff")),
)
_TORCH_ZIP = re.compile(rb"PK\x03\x04.{26}[^\0/]{1,200}/(?:data\.pkl|\.format_version)", re.DOTALL)
# ESC $ chooses characters of two bytes. What follows is looked at too: scripts have such escapes, followed by words.
_ESCAPES = re.compile(rb"\x1b\$(?:([@AB]|\([@-Q])(?:[!-~]{2})+\x1b[($]|([)*+][@-Q])[^\x0e]*\x0e)")
_ESCAPED = {
    **dict.fromkeys((b")A", b")G", b"*H", b")E"), "ISO-2022-CN"),
    **dict.fromkeys((b"A", b"(C", b"(D"), "ISO-2022-JP-2"),
    **dict.fromkeys((b"(O", b"(P", b"(Q"), "ISO-2022-JP-3"),
    b")C": "ISO-2022-KR",
}
_OLD_PICKLE = re.compile(
    rb"\x80[\x02\x03][\]})(cXUKMJGNq\x8a\x8c]"
)  # an opcode: safetensors can begin with the two bytes
_TAR = re.compile(rb".{257}ustar(?:\x0000|  \0)", re.DOTALL)
_STORE_ERROR = re.compile(rb"(?:<\?xml[^>]*>\s*)?<error>\s*<code>")
_BOM = b"\xef\xbb\xbf"
_MANY = 0.8  # share of zero bytes that only text in two or four bytes per character has, and only at fixed places


def recognize(content: bytes | bytearray) -> FileContent | None:
    """Return the kind of a file by its first ``HEAD_BYTES``; None for plain text and for unknown kinds."""
    head = bytes(content[:HEAD_BYTES])
    for what, remedy, pattern in _TEXTS:
        if pattern.match(head):
            return FileContent(what, remedy)
    if _TORCH_ZIP.match(head):
        return FileContent("weights of torch.save, a zip archive with a pickle", _TORCH)
    for what, remedy, beginnings in (*_KNOWN, *(_WORDS if _CONTROL.search(head) else ())):
        if head.startswith(beginnings):
            return FileContent(what, remedy)
    for what, remedy, pattern in (("a pickle of Python", _TABLE, _OLD_PICKLE), ("a tar archive", _UNPACK, _TAR)):
        if pattern.match(head):
            return FileContent(what, remedy)
    if head and not head.strip(b"\0"):
        return FileContent("zero bytes" if len(head) < HEAD_BYTES else "zero bytes at its beginning", _ZEROS)
    return _wide_text(head) or _markup(head)


def recognize_escaped(content: bytes | bytearray) -> FileContent | None:
    """Return the encoding, such as ISO-2022-JP, whose escape sequences are anywhere in bytes of ASCII."""
    if not content.isascii() or (found := _ESCAPES.search(content)) is None:
        return None
    encoding = _ESCAPED.get(bytes(found[1] or found[2]), "ISO-2022-JP")
    return FileContent(f"text in {encoding}, not in UTF-8", _CONVERT.format(encoding))


def recognize_file(path: Path) -> FileContent | None:
    """Return the kind of a file; None if it is not known, or the file cannot be read."""
    try:
        with path.open("rb") as file:
            return recognize(file.read(HEAD_BYTES))
    except OSError:
        return None


def broken_link(path: Path) -> str:
    """Return the problem of a path that is, or leads through, a link to nowhere; else ""."""
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            return f"{'' if each == path else f'{each} is '}a link to {each.readlink()}, which does not exist"
    return ""


def absence(path: str) -> str:
    """Return why a file or folder of the user cannot be used, without a full stop; empty if it is there."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is nothing (looked in {Path.cwd()})"
    except OSError as error:
        return f"it cannot be accessed: {error.strerror}"
    return ""


def nearest_folder(path: Path) -> Path:
    """Return the path or its nearest parent that exists; PermissionError if a parent may not be entered."""
    path = path.absolute()
    for each in (path, *path.parents):
        try:
            each.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return each
    return Path("/")


def _wide_text(head: bytes) -> FileContent | None:
    """Recognise UTF-16 or UTF-32 without a byte order mark, by the zero bytes of its ASCII characters."""
    if b"\0" not in head:
        return None
    for width, order in ((4, ("BE", "LE")), (2, ("BE", "LE"))):
        places = [head[place::width] for place in range(width)]
        if len(head) < 4 * width or not all(places):
            continue
        zeros = [place.count(0) / len(place) for place in places]
        for name, characters, rest in ((order[0], zeros[-1], zeros[:-1]), (order[1], zeros[0], zeros[1:])):
            if min(rest) > _MANY and characters < 1 - _MANY:
                encoding = f"UTF-{8 * width}{name}"
                return FileContent(f"text in {encoding}, not in UTF-8", _CONVERT.format(encoding))
    return None


def _markup(head: bytes) -> FileContent | None:
    text = head.removeprefix(_BOM).lstrip()[:256].lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return FileContent("a page of HTML, such as a server sends instead of a file", _AGAIN, is_markup=True)
    # Object stores report an error as XML, which a download keeps as if it were the file.
    if _STORE_ERROR.match(text):
        return FileContent("the error message of an object store", _AGAIN)
    return FileContent("XML", _TABLE, is_markup=True) if text.startswith(b"<?xml") else None


_MIB = 1 << 20


def read_small_file(path: Path, limit: int = _MIB, kind: str = "such a file") -> str:
    """Return the text of a regular file of at most ``limit`` bytes of UTF-8.

    Raises:
        ValueError: it cannot be used; the message continues a sentence that begins with the file's name.
        OSError: the file does not exist or may not be read.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        # A device, a pipe or a socket is rejected without reading from it.
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is a device or a pipe; give a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, too many for {kind}")
    if found := recognize(content):
        raise ValueError(f"it is {found.what}. {found.remedy.rstrip('.')}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"it is not text in UTF-8: line {line} holds the byte {content[error.start]:#04x}; save it as UTF-8"
        ) from None


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe without a writer would block


@contextmanager
def atomic_file(path: Path, *, sync: bool = True, sync_folder: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file that replaces ``path`` when the block has ended, and is removed if that fails.

    A crash at any moment leaves the old file or the complete new one under the name. ``sync`` False leaves out the
    fsync, so this holds for a killed process, but not for a power failure. With ``sync_folder`` the new file is what a
    power failure leaves once the block has ended. OSError if the disk refuses.
    """
    # In the same folder, because a rename works within one file system. With a random name, because several processes,
    # perhaps of other machines, may write at the same time.
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if sync:  # before the rename: else a power failure could leave the final name with a part of the bytes
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync_folder:
        sync_to_disk(path.parent)


def write_atomic(
    path: Path, *chunks: bytes | memoryview, sync: bool = True, sync_folder: bool = False
) -> None:  # arguments and errors as for ``atomic_file``
    """Write a file completely or not at all."""
    with atomic_file(path, sync=sync, sync_folder=sync_folder) as file:
        file.writelines(chunks)


def sync_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, would survive a power failure; OSError if fsync fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
