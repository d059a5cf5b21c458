"""Shards of HLAT and NxDT: the source model's weights and logits, whatever was fused, strided and repeated."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hlat.checkpoint import import_model, load_model
from hlat.checkpoint.protocol.reader import open_checkpoint, verify_checkpoint
from hlat.config import RecipeError
from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, build
from hlat.model.hf.config import config_json
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.nxd_checkpoints import NxdLayout, key_and_copy, rank_state, save, stored_keys, write
from tests.support.checkpoint.saved_states import assert_equal
from tests.support.model.canonical import to_canonical

FIELDS = {"vocab_size": 64, "layers": 4, "hidden_size": 32, "intermediate_size": 48, "heads": 8, "init_std": 0.2}
MHA = ModelConfig.model_validate(FIELDS | {"max_sequence_length": 32})
GQA = ModelConfig.model_validate(FIELDS | {"kv_heads": 2, "max_sequence_length": 32})

LAYOUTS = {
    "hlat 7b: strided qkv": (MHA, NxdLayout(4, 2)),
    "hlat 70b: keys repeated": (GQA, NxdLayout(4, 2, copies=2, fusion="separate")),
    "repeated four times": (GQA, NxdLayout(8, 1, copies=4, fusion="separate")),
    "one matrix": (GQA, NxdLayout(4, 2, copies=2, fusion="one")),
    "one matrix, not repeated": (GQA, NxdLayout(2, 4, fusion="one", references=False)),
    "trainium 2: copies side by side": (GQA, NxdLayout(4, 1, copies=2, fusion="separate", blocked=True)),
    "split": (GQA, NxdLayout(2, 2, fusion="none", references=False)),
}


def source_model(config: ModelConfig) -> tuple[Decoder, dict[str, torch.Tensor]]:
    model = build(config, device="cpu", seed=2)
    return model, {name: t.detach() for name, t in to_canonical(config, dict(model.named_parameters())).items()}


def model_file(folder: Path, config: ModelConfig) -> Path:
    content = config_json(config, torch.float32, eos_id=None, bos_id=None)
    (folder / "config.json").write_text(json.dumps(content))
    return folder / "config.json"


@pytest.mark.parametrize("case", LAYOUTS)
def test_shards_give_the_source_models_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    config, layout = LAYOUTS[case]
    model, weights = source_model(config)
    shards = write(tmp_path / "step_1000", config, weights, layout, monkeypatch)
    imported = import_model(shards, tmp_path / "imported", model=model_file(tmp_path, config))
    assert verify_checkpoint(imported) == []
    assert_equal(open_checkpoint(imported).load("model."), weights)
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    found, _ = load_model(imported, "cpu")
    with torch.no_grad():
        assert torch.equal(found(tokens), model(tokens))


def test_ranks_as_they_compute_are_the_imported_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own weights, in the order that its ranks gave them: each rank attends with its own heads, and adds up.

    No formula for the order of query heads is used: they are what the ranks' matrices say.
    """
    layout = NxdLayout(8, 1, copies=4, fusion="separate")
    _, weights = source_model(GQA)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(7))
    total = torch.zeros(2, 5, 32)
    (tmp_path / "shards").mkdir()
    for rank in range(layout.tensor):
        state = rank_state(GQA, weights, layout, rank, 0)
        here = "model.layers.0.self_attn."
        generator = torch.Generator().manual_seed(100 + rank)
        for name in (f"{here}qkv_proj.weight_q", f"{here}o_proj.weight"):
            state[name] = torch.randn(state[name].shape, generator=generator)  # what training made of it
        save(tmp_path / "shards" / f"tp_rank_{rank:02d}_pp_rank_00.pt", state, False, monkeypatch)
        q, k, v = (heads(x @ state[f"{here}qkv_proj.weight_{name}"].T) for name in "qkv")
        attended = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        total += attended.transpose(1, 2).flatten(2) @ state[f"{here}o_proj.weight"].T
    imported = import_model(tmp_path / "shards", tmp_path / "out", model=model_file(tmp_path, GQA))
    found = open_checkpoint(imported).load("model.model.layers.0.self_attn.")
    q, k, v = (heads(x @ found[f"{name}_proj.weight"].T) for name in "qkv")
    attended = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    # sums of 8 terms of size about 30 in another order: a few roundings of 2^-24 of them
    torch.testing.assert_close(attended.transpose(1, 2).flatten(2) @ found["o_proj.weight"].T, total, rtol=0, atol=1e-4)


def heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(-1, (-1, GQA.n_head_dim)).transpose(1, 2)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    layout = NxdLayout(4, 2, copies=2, fusion="separate")
    return write(tmp_path / "shards", GQA, source_model(GQA)[1], layout, monkeypatch)


def refused(folder: Path, **arguments: object) -> str:
    out = folder.parent / "out"
    with pytest.raises((CheckpointError, RecipeError)) as caught:
        import_model(folder, out, **arguments)  # type: ignore[arg-type]
    assert not out.exists()
    assert not list(out.parent.glob(".staging*"))
    return str(caught.value)


def test_the_model_has_to_be_given(shards: Path, tmp_path: Path) -> None:
    assert "Give --model" in refused(shards)
    assert "The nearest presets are llama-2-7b, " in refused(shards, model="llama2-7b")
    wrong = GQA.model_copy(update={"intermediate_size": 64, "layers": 5})
    assert "model.layers.4.self_attn.q_proj.weight: missing" in refused(shards, model=model_file(tmp_path, wrong))
    narrower = GQA.model_copy(update={"intermediate_size": 40})
    text = refused(shards, model=model_file(tmp_path, narrower))
    assert "model.layers.3.mlp.down_proj.weight: tensor rank 3, pipeline rank 1 has (32, 12) of it" in text
    assert "gate_up_proj.weight: tensor rank 0, pipeline rank 0 has 24 rows of it, the model has 20" in text


def test_missing_files_are_named(shards: Path, tmp_path: Path) -> None:
    config = model_file(tmp_path, GQA)
    tensors = shards / "model" / "dp_rank_00_tp_rank_01_pp_rank_01.pt.tensors"
    (tensors / "tensor_3.pt").unlink()
    assert "tensor_3.pt: no such file" in refused(shards, model=config)
    (shards / "model" / "dp_rank_00_tp_rank_02_pp_rank_01.pt").unlink()
    assert "tensor rank 2, pipeline rank 1" in refused(shards, model=config)
    damaged = shards / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    damaged.write_bytes(damaged.read_bytes()[:100])
    (shards / "model" / "dp_rank_00_tp_rank_02_pp_rank_01.pt").write_bytes(b"")
    assert "damaged" in refused(shards, model=config)


def test_copies_of_keys_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = NxdLayout(4, 1, copies=2, fusion="separate", references=False)
    folder = write(tmp_path / "shards", GQA, source_model(GQA)[1], layout, monkeypatch)
    for layer, message in (
        (3, "model.layers.3.self_attn.k_proj.weight: the copies"),
        (0, "which differ from each other"),
    ):
        path = folder / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt"
        state = torch.load(path, weights_only=True)
        state[f"model.layers.{layer}.self_attn.qkv_proj.weight_k"][0, 0] += 1
        torch.save(state, path)
        assert message in refused(folder, model=model_file(tmp_path, GQA))


@pytest.mark.parametrize("names", ["both", "head", "other"])
def test_tied_embeddings_have_either_name_or_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    config = GQA.model_copy(update={"tie_embeddings": True})
    _, weights = source_model(config)
    embedding = weights["model.embed_tokens.weight"]
    both = {**weights, "lm_head.weight": embedding * 2 if names == "other" else embedding}
    folder = write(tmp_path / "shards", config, both, NxdLayout(2, 2, fusion="none", references=False), monkeypatch)
    for file in (folder / "model").glob("dp_rank_00_*_pp_rank_00.pt") if names == "head" else ():
        state = torch.load(file, weights_only=True)
        del state["model.embed_tokens.weight"]
        torch.save(state, file)
    model = model_file(tmp_path, config)
    if names == "other":
        assert "lm_head.weight: differs from model.embed_tokens.weight" in refused(folder, model=model)
        return
    assert_equal(open_checkpoint(import_model(folder, tmp_path / "out", model=model)).load("model."), weights)


def test_a_tensor_in_two_stages_with_other_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = NxdLayout(2, 2, fusion="none", references=False)
    folder = write(tmp_path / "shards", GQA, source_model(GQA)[1], layout, monkeypatch)
    first = torch.load(folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    file = folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt"
    name = "model.layers.1.input_layernorm.weight"
    torch.save({**torch.load(file, weights_only=True), name: first[name] + 1}, file)
    other = folder / "model" / "dp_rank_00_tp_rank_01_pp_rank_01.pt"
    torch.save({**torch.load(other, weights_only=True), name: first[name]}, other)
    text = refused(folder, model=model_file(tmp_path, GQA))
    assert f"{name}: {name} of pipeline rank 0 and {name} of pipeline rank 1 differ" in text


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/attacked-by-a-shard",)


def test_code_in_a_shard_is_not_run(shards: Path, tmp_path: Path) -> None:
    proof = Path("/tmp/attacked-by-a-shard")
    proof.unlink(missing_ok=True)
    config = model_file(tmp_path, GQA)
    for name in ("dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors/tensor_0.pt", "dp_rank_00_tp_rank_00_pp_rank_00.pt"):
        torch.save({"model.embed_tokens.weight": Attack()}, shards / "model" / name)
        assert "nothing was run" in refused(shards, model=config)
    assert not proof.exists()


def test_the_pairing_of_the_test_is_the_one_of_the_converter() -> None:
    """``checkpoint_converter.py`` of NxD gives 64 query heads, 16 key heads and 4 copies as an example."""
    config = GQA.model_copy(update={"heads": 64, "kv_heads": 16, "hidden_size": 256})
    layout = NxdLayout(64, 1, copies=4)
    keys = [
        key_and_copy(config, layout, position)[0]
        for rank in range(64)
        for position in stored_keys(config, layout, rank)
    ]
    assert keys == list(range(16)) * 4
    side_by_side = replace(layout, blocked=True)
    assert [key_and_copy(config, side_by_side, position)[0] for position in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
