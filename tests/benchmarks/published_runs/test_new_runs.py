"""Newly published runs: the table of numbers and settings is well formed, and shares no source with the known ones.

Nothing is predicted here: the table is to judge predictions that were written down before anyone compared them.
"""

import csv
import re
from collections.abc import Iterator
from math import isclose
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # tables that are complete, and change rarely

FOLDER = Path(__file__).parents[3] / "benchmarks" / "published"
# Each set in the order of collection, with the least numbers of rows and of sources it was to have.
SETS = {"new_runs.csv": (250, 12), "new_runs_2.csv": (120, 10), "new_runs_3.csv": (150, 10)}
KNOWN = ("published_runs.csv", "published_runs_vtrain_single.csv")
STATED = (
    "id",
    "source",
    "where",
    "address",
    "published",
    "accessed",
    "quotation",
    "reading",
    "model",
    "chip",
    "n_chips",
)
CHOICES = {
    "subset": {"core", "bulk"},
    "family": {"dense"},
    "confidence": {"high", "med", "low"},
    "reading": {
        "measured table",
        "measured log",
        "stated in text",
        "read from a plot (number printed on the bar)",
    },
    "gated_mlp": {"", "0", "1"},
    "tied_embeddings": {"", "0", "1"},
    "sp": {"", "0", "1"},
    "zero_stage": {"", "0", "1", "2", "3"},
}
SHAPE = ("n_params", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len")
BATCH = ("global_batch", "micro_batch", "n_chips", "chips_per_node", "devices_per_chip")
LAYOUT = ("tp", "pp", "cp", "ep", "dp", "replicas", "vpp")
RESULTS = ("tokens_per_s", "samples_per_s", "tokens_per_s_per_chip", "step_time_s", "tflops_per_chip", "mfu")
POSITIVE = (*SHAPE, *BATCH, *LAYOUT, *RESULTS, "hfu", "memory_per_chip_gib", "tok_s_chip_norm")

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


ROWS = {name: read(FOLDER / name) for name in SETS}
every_set = pytest.mark.parametrize("name", SETS)


def numbers(row: Row, *names: str) -> list[float] | None:
    """Numbers of a row, or None if one of them is not given."""
    return [float(row[name]) for name in names] if all(row[name] for name in names) else None


def matrix_weights(row: Row) -> float | None:
    """Weights that a token is multiplied with: those of the layers and of the output matrix; None if not given."""
    shape = numbers(row, "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated_mlp", "vocab")
    if shape is None:
        return None
    layers, hidden, heads, kv_heads, head_dim, ffn, gated, vocab = shape
    layer = 2 * hidden * head_dim * (heads + kv_heads) + (3 if gated else 2) * hidden * ffn
    return layers * layer + hidden * vocab


def flops_per_token(row: Row) -> float | None:
    """FLOPs of a token's forward and backward pass with complete attention; None if the shape is not given."""
    weights, attention = matrix_weights(row), numbers(row, "layers", "seq_len", "heads", "head_dim")
    if weights is None or attention is None:
        return None
    layers, sequence, heads, head_dim = attention
    return 6 * weights + 12 * layers * sequence * heads * head_dim


def form_problems(row: Row) -> Iterator[str]:
    """Fields that are missing, out of range or unreadable."""
    yield from (f"{name} is empty" for name in STATED if not row[name])
    yield from (f"{name}: {row[name]}" for name, allowed in CHOICES.items() if row[name] not in allowed)
    yield from (f"{name} is not positive" for name in POSITIVE if row[name] and not float(row[name]) > 0)
    # A program reaches at least a few hundredths of the peak; kernels of matrix products stay below 80 %.
    yield from (f"{name}: {row[name]}" for name in ("mfu", "hfu") if row[name] and not 0.05 <= float(row[name]) <= 0.8)
    if not any(row[name] for name in RESULTS):
        yield "no result"
    if not re.fullmatch(r"https://[^\s]+", row["address"]):
        yield "address"
    if not (re.fullmatch(r"20\d\d-\d\d(-\d\d)?", row["published"]) and row["published"] <= row["accessed"]):
        yield "date of publication"
    if not re.search(r"\d", row["quotation"]) or len(re.findall(r"[A-Za-z]{3,}", row["quotation"])) > 6:
        yield "the quotation is a number with its unit"
    if "formula" in row["norm_basis"] and "tok_s_chip_norm" not in row["derived"]:
        yield "a rate computed from FLOPs is not marked as derived"


def product_problems(row: Row) -> Iterator[str]:
    """Numbers of one row that contradict each other."""
    layout = numbers(row, "tp", "pp", "cp", "dp", "n_chips", "devices_per_chip")
    if layout is not None and layout[0] * layout[1] * layout[2] * layout[3] != layout[4] * layout[5]:
        yield "tp * pp * cp * dp is not the number of devices"
    batch = numbers(row, "global_batch", "micro_batch", "dp")
    if batch is not None and batch[0] % (batch[1] * batch[2]):
        yield "the ranks' micro-batches do not divide the global batch"
    step = numbers(row, "global_batch", "seq_len", "step_time_s", "n_chips", "tok_s_chip_norm")
    # Published steps have three digits, and the average of rates is not the rate of the average.
    if step is not None and not isclose(step[0] * step[1] / step[2] / step[3], step[4], rel_tol=0.03):
        yield "step time and tokens per second disagree"
    published = numbers(row, "tokens_per_s_per_chip", "tok_s_chip_norm")
    if published is not None and published[0] != published[1]:
        yield "the published tokens per second and chip are not those used"
    rate = numbers(row, "samples_per_s", "seq_len", "n_chips", "tok_s_chip_norm")
    if rate is not None and not isclose(rate[0] * rate[1] / rate[2], rate[3], rel_tol=0.03):
        yield "sequences and tokens per second disagree"
    per_token, flops = flops_per_token(row), numbers(row, "tok_s_chip_norm", "tflops_per_chip")
    # Counted or not: half of attention and the output matrix (0.6 at least), recomputation (4/3), the embedding (1.08).
    if per_token is not None and flops is not None and not 0.6 <= flops[1] * 1e12 / (per_token * flops[0]) <= 1.45:
        yield "tokens per second and FLOP/s disagree"


def places(rows: list[Row]) -> set[str]:
    """Documents and sources of rows."""
    return {" ".join(row["where"].split("@")[0].split()[:3]) for row in rows} | {row["source"] for row in rows}


@every_set
def test_there_are_enough_rows_of_enough_sources(name: str) -> None:
    rows, (least, sources) = ROWS[name], SETS[name]
    assert len(rows) >= least
    assert len({row["source"] for row in rows}) >= sources
    assert all(None not in row and None not in row.values() for row in rows), "as many fields as columns"


def test_every_row_has_its_own_id() -> None:
    ids = [row["id"] for rows in ROWS.values() for row in rows]
    assert len(set(ids)) == len(ids)


@every_set
def test_rows_are_well_formed(name: str) -> None:
    assert {row["id"]: problems for row in ROWS[name] if (problems := list(form_problems(row)))} == {}


@every_set
def test_rows_agree_with_themselves(name: str) -> None:
    assert {row["id"]: problems for row in ROWS[name] if (problems := list(product_problems(row)))} == {}


def test_all_sets_have_the_same_columns() -> None:
    assert len({tuple(rows[0]) for rows in ROWS.values()}) == 1


def test_the_columns_of_the_shared_table_come_first(shared: Path) -> None:
    with (shared / "data" / KNOWN[0]).open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file))
    assert list(ROWS["new_runs.csv"][0])[: len(columns)] == columns


def test_no_set_has_a_source_of_an_earlier_one() -> None:
    earlier: set[str] = set()
    for rows in ROWS.values():
        assert places(rows) & earlier == set()
        earlier |= places(rows)


@every_set
def test_no_source_is_among_the_shared_ones(name: str, shared: Path) -> None:
    known = [row for file in KNOWN for row in read(shared / "data" / file)]
    assert places(ROWS[name]) & places(known) == set()
