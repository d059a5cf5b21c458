"""JSON lines: appended records can be read, bit for bit, even if the writer is killed."""

import fcntl
import itertools
import json
import math
import os
import resource
import signal
import struct
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hlat.runtime.errors import DataError, StorageError
from hlat.tracking import flat_fields, metrics_table
from hlat.tracking.jsonl import JsonLines, decode_record, encode, filter_lines, from_json_value, read_records

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
RECORDS = st.dictionaries(st.text(), st.one_of(FLOATS, st.integers(), st.text(), st.none(), st.booleans()))


def bits(value: float) -> bytes:
    """Return the bits of a float; all NaNs count as equal, because JSON cannot distinguish them."""
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


@given(FLOATS)
@example(-0.0)
@example(5e-324)
@example(2.3412345678901234)
@example(math.inf)
@example(-math.inf)
@example(math.nan)
def test_a_float_is_restored_bit_for_bit_from_strict_json(value: float) -> None:
    line = encode({"loss": value, "seconds": {"data": value}})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    record = from_json_value(json.loads(line, parse_constant=refuse))
    assert bits(record["loss"]) == bits(value)
    assert bits(record["seconds"]["data"]) == bits(value)


def same(one: object, two: object) -> bool:
    """Compare JSON values: floats by their bits, and an integer is no float."""
    if isinstance(one, dict) and isinstance(two, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return bits(one) == bits(two)
    return type(one) is type(two) and one == two


JSON_VALUES = st.recursive(
    st.one_of(FLOATS, st.integers(), st.text(st.characters()), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(st.characters()), inner)),
    max_leaves=6,
)


@given(st.dictionaries(st.text(st.characters()), JSON_VALUES), st.booleans())
@example({"name": "\udc80 of a file", "n": 2**200, "x": [1e308, 5e-324, -0.0, 0.1]}, True)
@example({"x": math.nan, "y": math.inf}, True)
def test_a_line_is_decoded_as_pythons_json_does(record: dict[str, object], escaped: bool) -> None:
    line = json.dumps(record, ensure_ascii=escaped).encode(errors="surrogatepass")
    try:
        expected = json.loads(line)
    except ValueError:
        expected = None
    assert same(decode_record(line), expected)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:0123456789.eE+-ntrulfasN \\', max_size=40).map(str.encode))
@example(b'{"a": 1, "a": 2}')
@example(b"{" * 100_000)
@example(b'{"a": 01}')
@example(b'{"a": 1.}')
@example(b'{"a": -}')
@example(b'{"a": "\t"}')
@example(b'{"a": 1}\x00')
@example(b'{"a": NaN, "b": -Infinity}')
@example(b'\xef\xbb\xbf{"a": 1}')
def test_a_damaged_line_is_one_that_pythons_json_refuses(line: bytes) -> None:
    try:
        expected = json.loads(line)
    except (ValueError, RecursionError):
        expected = None
    assert same(decode_record(line), expected if isinstance(expected, dict) else None)


@given(st.lists(RECORDS, max_size=4), st.data())
def test_a_file_truncated_anywhere_opens_with_exactly_its_complete_lines(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]], data: st.DataObject
) -> None:
    whole = b"".join(map(encode, records))
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    path.write_bytes(whole[:cut])
    with closing(JsonLines(path)) as file:
        file.append({"last": 1})
    # A line that lacks only its newline is complete.
    kept = whole[: cut + 1] if decode_record(whole[:cut].rpartition(b"\n")[2]) is not None else whole[:cut]
    kept = kept[: kept.rfind(b"\n") + 1]
    assert path.read_bytes() == kept + encode({"last": 1})
    assert len(read_records(path)) == kept.count(b"\n") + 1


def test_an_incomplete_line_longer_than_the_read_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(encode({"a": 1}) + b'{"b": "' + b"x" * 200_000)
    with closing(JsonLines(path)):
        pass
    assert path.read_bytes() == encode({"a": 1})


def test_zeros_at_the_end_after_a_power_failure_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(encode({"a": 1}) + bytes(4096))
    with closing(JsonLines(path)) as file:
        file.append({"b": 2})
    assert read_records(path) == [{"a": 1}, {"b": 2}]


def test_a_reader_ignores_the_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(encode({"a": 1}) + b'{"b": ')
    assert read_records(path) == [{"a": 1}]
    assert path.read_bytes().endswith(b'{"b": '), "reading must not change the file of a run at work"


def test_a_damaged_line_inside_the_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(encode({"a": 1}) + b'{"b": 2\n' + encode({"c": 3}))
    with pytest.raises(DataError, match=r"lines\.jsonl, line 2: '\{\"b\": 2' is not a JSON object"):
        read_records(path)


def test_a_full_disk_is_a_storage_error_that_names_file_and_remedy() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with (
        closing(JsonLines(Path("/dev/full"))) as file,
        pytest.raises(StorageError, match=r"/dev/full: cannot write: No space left on device\. Free space"),
    ):
        file.append({"a": 1})


def test_a_disk_that_fills_up_within_a_line_keeps_the_lines_before_it(tmp_path: Path) -> None:
    """A file size limit makes write() stop half way; in a child process, because the limit cannot be undone."""
    path = tmp_path / "lines.jsonl"
    whole = encode({"a": "x" * 80})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
            with closing(JsonLines(path)) as file:
                file.append({"a": "x" * 80})
                file.append({"a": "x" * 80})
                try:
                    file.append({"a": "x" * 80})  # 90 bytes each: the third does not fit
                except StorageError:
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_bytes() == whole * 2


def test_a_folder_that_cannot_be_created_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"run/metrics\.jsonl: cannot open"):
        JsonLines(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.parametrize("crash_in", ["fsync", "replace"])
def test_filtering_lines_is_atomic(crash_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    before = b"".join(encode({"step": step}) for step in range(100))
    path.write_bytes(before)

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if crash_in == "fsync" else (Path, "replace")), fail)
        with pytest.raises(StorageError, match="cannot rewrite: No space left"):
            filter_lines(path, lambda line: b"7" in line)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"
    (tmp_path / "lines.jsonl.0f3a.tmp").touch()  # of a process that was killed
    filter_lines(path, lambda line: b"7" in line)
    assert list(tmp_path.iterdir()) == [path]
    assert [record["step"] for record in read_records(path)] == [s for s in range(100) if "7" in str(s)]


def test_several_writers_lose_no_line_when_some_are_killed(tmp_path: Path) -> None:
    """A run and its supervisor write to the same file; a half-written line of one must not damage the other's."""
    path, children = tmp_path / "lines.jsonl", []
    for writer in range(4):
        child = os.fork()
        if child == 0:
            with closing(JsonLines(path)) as file:
                for number in itertools.count() if writer == 0 else range(200):  # the first writer is killed later
                    file.append({"writer": writer, "number": number, "text": "x" * 5000})
                    (tmp_path / f"done-{writer}").write_text(str(number))
            os._exit(0)
        children.append(child)
    while not all((tmp_path / f"done-{writer}").exists() for writer in range(4)):
        time.sleep(0.001)
    os.kill(children[0], signal.SIGKILL)
    with path.open("ab") as killed:  # stopped within a line, holding the lock
        fcntl.flock(killed, fcntl.LOCK_EX)
        killed.write(b'{"writer": 0, "number": ')
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [-signal.SIGKILL, 0, 0, 0]
    found = read_records(path)
    for writer in (1, 2, 3):
        assert [record["number"] for record in found if record["writer"] == writer] == list(range(200))


def test_a_writer_stopped_within_a_line_blocks_others_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr("hlat.tracking.jsonl._PATIENCE", 0.1)
    with path.open("ab") as stopped, closing(JsonLines(path)) as file:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        file.append({"a": 1})
    assert read_records(path) == [{"a": 1}]


def test_recipes_that_differ_by_an_empty_section_have_other_fields(tmp_path: Path) -> None:
    """As by a component without options, on one host of two; records of steps have no such values."""
    with_component, without = ({"training": {"components": one}, "seed": 1} for one in ({"a:B": {}}, {}))
    assert flat_fields(with_component) == {"training.components.a:B": {}, "seed": 1}
    assert flat_fields(without) == {"training.components": {}, "seed": 1}
    (tmp_path / "metrics.jsonl").write_bytes(encode({"step": 1, "loss": 2.0, "seconds": {}}))
    assert metrics_table(tmp_path).column_names == ["step", "loss"]
