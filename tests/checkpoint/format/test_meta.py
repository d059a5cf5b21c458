"""meta.json with invalid fields and valid checksums: ``verify_checkpoint`` reports it, and every reader refuses it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint import (
    collect,
    export_hf,
    find_checkpoints_folder,
    list_checkpoints,
    load_model,
    open_unverified,
    read_saved_run,
)
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import open_checkpoint, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from hlat.model import build, collect_local_parameters
from hlat.runtime.errors import CheckpointError
from tests.checkpoint.format.test_hostile import assert_refused, seal
from tests.support.checkpoint.saved_states import state

META = {
    "step": 1,
    "samples": 8,
    "tokens": 64,
    "recipe": {"model": {"layers": 1}, "data": {"path": "x"}, "faults": [{"kind": "hang"}]},
    "data_fingerprint": "abc",
    "versions": {"hlat": "0.1.0", "torch": "2.13.0"},
    "anomalies": {"losses": [1.5, 2], "norms": [], "skipped_steps": [1], "rollbacks": [{"step": 1, "samples": [0, 8]}]},
    "special_ids": {"bos": 1, "eos": [2, 3], "pad": None},
    "a field of a later version": [1],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return CheckpointStore(tmp_path / "checkpoints", 1).save(1, replicated_chunks(state(1)), META)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    edit(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    seal(folder)


def test_metadata_of_hlat_is_valid(folder: Path) -> None:
    assert verify_checkpoint(folder) == [] and open_checkpoint(folder).meta == META


INVALID = [None, True, -1, 2**63, 1.5, float("inf"), "many", [], [1], {}, {"a": 1}, [[[]]]]
VALID = {
    "samples": [], "tokens": [], "versions": [{}], "recipe": [{}], "data_fingerprint": ["many"],
    "anomalies": [None], "special_ids": [{}],
}  # fmt: skip


@pytest.mark.parametrize("invalid", INVALID, ids=repr)
@pytest.mark.parametrize("name", VALID)
def test_a_field_of_the_wrong_type_is_reported_as_damage(folder: Path, name: str, invalid: Any) -> None:
    if any(invalid is fit or (invalid == fit and type(invalid) is type(fit)) for fit in VALID[name]):
        pytest.skip("that is a value it may have")
    change(folder, lambda meta: meta.update({name: invalid}))
    assert_refused(folder, f"meta.json has invalid fields: {name}")
    assert [entry.state for entry in list_checkpoints(folder.parent)] == ["damaged"] or not folder.exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda meta: meta.update(step="1"),
        lambda meta: meta["anomalies"].update(losses=[float("nan")]),
        lambda meta: meta["anomalies"].update(skipped_steps=[float("inf")]),
        lambda meta: meta["anomalies"]["rollbacks"].append({"step": 1, "samples": [1, 2, 3]}),
        lambda meta: meta["versions"].update(torch=2.13),
        lambda meta: meta["recipe"].update(model="llama"),
        lambda meta: meta["special_ids"].update(eos=[-1]),
        lambda meta: meta["special_ids"].update(other=1),
    ],
)
def test_nested_fields_are_checked(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    change(folder, edit)
    assert_refused(folder, "meta.json has invalid fields")


@pytest.mark.parametrize("text", ["", "[]", "7", "null", '"text"', "[" * 100_000, "{", '{"step": 1', "1" * 10_000])
def test_metadata_that_is_not_an_object_is_damage(folder: Path, text: str) -> None:
    (folder / "meta.json").write_text(text)
    seal(folder)
    assert_refused(folder, "meta.json is not")


def test_the_step_must_equal_that_of_the_manifest(folder: Path) -> None:
    change(folder, lambda meta: meta.update(step=2))
    assert verify_checkpoint(folder) == ["meta.json is of step 2, the manifest of step 1"]


def test_listing_and_opening_report_invalid_metadata(folder: Path) -> None:
    change(folder, lambda meta: meta.update(tokens="many"))
    (entry,) = list_checkpoints(find_checkpoints_folder(folder.parent))
    assert entry.state == "damaged" and "tokens: input should be a valid integer" in entry.problem
    with pytest.raises(CheckpointError, match="tokens: input should be a valid integer"):
        open_unverified(folder)


def test_imported_weights_are_not_the_checkpoint_of_a_run(folder: Path) -> None:
    change(folder, lambda meta: [meta.pop(name) for name in ("recipe", "data_fingerprint")])
    assert verify_checkpoint(folder) == []
    with pytest.raises(CheckpointError, match=r"no recipe and no data_fingerprint.*checkpoint\.init_from"):
        read_saved_run(open_checkpoint(folder))


TINY = ModelConfig(vocab_size=32, layers=2, hidden_size=8, intermediate_size=16, heads=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 10_000}, "the model has 10,000 layers, but there are only 21 tensors"),
        ({"layers": 10**9}, "less than or equal to 10000"),
        ({"layers": 3}, "problem"),
        ({"vocab_size": 2**31 - 1}, "problem"),
        ({"hidden_size": 2**24}, "problem"),
        ({"hidden_size": 10**30}, "less than or equal to 16777216"),
        ({"head_dim": 1}, "a head must be even"),
        ({"heads": 3}, "not a multiple"),
        ({"kv_heads": 2**20}, "cannot be shared out"),
        ({"rope": {"theta": "x"}}, "this version does not support its model section"),
    ],
)
def test_weights_that_do_not_fit_the_model_section_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model section is compared with the weights before the model is built."""
    model = build(TINY, device="cpu", seed=0)
    chunks = collect(TINY, collect_local_parameters(model))
    meta = {"step": 1, "model": TINY.model_dump(mode="json") | fields}
    saved = CheckpointStore(tmp_path / "checkpoints", 1).save(1, chunks, meta)
    monkeypatch.setattr("hlat.checkpoint.stored_model.build", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(CheckpointError, match=message):
        load_model(saved, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=message):
        export_hf(saved, tmp_path / "hf")
