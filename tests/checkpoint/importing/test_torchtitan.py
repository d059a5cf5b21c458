"""A checkpoint that torch's own planner wrote in torchtitan's names imports, with the logits of its own rotation."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from hlat.checkpoint import import_model, load_model
from hlat.checkpoint.format.index import INDEX_NAME
from hlat.checkpoint.importing import torchtitan
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.config.sections.model import ModelConfig
from hlat.model import build
from hlat.model.hf.config import config_json
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_states import assert_equal
from tests.support.model.canonical import to_canonical

CONFIG = ModelConfig.model_validate(
    {
        "vocab_size": 64,
        "layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "heads": 4,
        "kv_heads": 2,
        "max_sequence_length": 32,
        "init_std": 0.2,
    }
)
EMBEDDING = "tok_embeddings.weight"
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output",
}


def titan_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def neighbours(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a projection for a rotation of neighbours: row i of a half becomes row 2i or 2i + 1 of the head."""
    half = CONFIG.n_head_dim // 2
    heads = weight.unflatten(0, (-1, CONFIG.n_head_dim)).clone()
    ordered = torch.empty_like(heads)
    ordered[:, 0::2], ordered[:, 1::2] = heads[:, :half], heads[:, half:]
    return ordered.flatten(0, 1)


def written(folder: Path, prefix: str = "") -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
    """Write a checkpoint as a run of torchtitan does, with optimizer and data state: folder, weights, logits."""
    model = build(CONFIG, device="cpu", seed=4)
    weights = {name: t.detach() for name, t in to_canonical(CONFIG, dict(model.named_parameters())).items()}
    state: dict[str, Any] = {
        prefix + titan_name(name): neighbours(tensor) if name.endswith(("q_proj.weight", "k_proj.weight")) else tensor
        for name, tensor in weights.items()
    }
    state["optimizer"] = {"state": {"layers.0.attention.wq.weight": {"exp_avg": torch.ones(3)}}, "param_groups": [1]}
    state["train_state"] = {"step": torch.tensor(7), "log_steps": [1, 2]}
    state["dataloader"] = {"rank": b"bytes"}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    with torch.no_grad():
        return folder, weights, model(tokens())


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))


def model_file(folder: Path, config: ModelConfig = CONFIG) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config_json(config, torch.float32, eos_id=None, bos_id=None)))
    return path


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_checkpoint_of_torchs_planner_imports(tmp_path: Path, prefix: str) -> None:
    folder, weights, logits = written(tmp_path / "step-7", prefix)
    imported = import_model(folder, tmp_path / "out", model=model_file(tmp_path))
    assert_equal(open_checkpoint(imported).load("model."), weights)
    model, _ = load_model(imported, "cpu")
    with torch.no_grad():
        assert torch.equal(model(tokens()), logits)


TIED = CONFIG.model_copy(update={"tie_embeddings": True})


def resaved(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write the weights of a model with tied embeddings, after a change of the names."""
    model = build(TIED, device="cpu", seed=4)
    weights = to_canonical(TIED, dict(model.named_parameters()))
    state: dict[str, Any] = {titan_name(name): tensor.detach() for name, tensor in weights.items()}
    change(state)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("both", [True, False])
def test_tied_embeddings_have_either_name_or_both(tmp_path: Path, both: bool) -> None:
    take = dict.get if both else dict.pop
    folder = resaved(tmp_path / "step-7", lambda state: state.update({"output.weight": take(state, EMBEDDING)}))
    imported = import_model(folder, tmp_path / "out", model=model_file(tmp_path, TIED))
    found = open_checkpoint(imported).load("model.")
    model = build(TIED, device="cpu", seed=4)
    assert torch.equal(found["model.embed_tokens.weight"], model.embedding.weight)
    assert "lm_head.weight" not in found


def test_one_tensor_under_two_names_and_float8_are_refused(tmp_path: Path) -> None:
    folder = resaved(tmp_path / "twice", lambda state: state.update({"model.norm.weight": torch.zeros(32)}))
    assert "norm.weight and model.norm.weight" in refused(folder, TIED)
    name = "layers.0.feed_forward.w1.weight"
    folder = resaved(tmp_path / "float8", lambda state: state.update({name: state[name].to(torch.float8_e4m3fn)}))
    assert "layers.0.mlp.gate_proj.weight: of the data type float8_e4m3fn" in refused(folder, TIED)


def test_rows_are_those_of_a_rotation_of_neighbours() -> None:
    """Rotating neighbours by torchtitan's complex numbers equals rotating halves, after reordering the rows."""
    width = 8
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.outer(torch.arange(3.0).double(), 10000.0 ** -(torch.arange(0, width, 2).double() / width))
    rotated = torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(()).double(), angles)
    )
    halves = torchtitan.halves_of_heads(x.T, width).T
    first, second = halves.chunk(2, -1)
    ours = torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
    expected = torchtitan.halves_of_heads(rotated.flatten(-2).T, width).T
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)  # float64: a few roundings of 2^-53


def refused(folder: Path, config: ModelConfig = CONFIG) -> str:
    out = folder.parent / "out"
    with pytest.raises(CheckpointError) as caught:
        import_model(folder, out, model=model_file(folder.parent, config))
    assert not out.exists()
    return str(caught.value)


def test_other_models_and_missing_files_are_refused(tmp_path: Path) -> None:
    folder, _, _ = written(tmp_path / "step-7")
    assert "model.layers.2.mlp.up_proj.weight: missing" in refused(folder, CONFIG.model_copy(update={"layers": 3}))
    tied = refused(folder, CONFIG.model_copy(update={"tie_embeddings": True}))
    assert "lm_head.weight: differs from model.embed_tokens.weight" in tied
    for file in folder.glob("*.distcp"):
        file.unlink()
    assert "is not a file of this checkpoint" in refused(folder)
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"other": torch.ones(2)}, checkpoint_id=str(folder), no_dist=True)
    assert "no weights under torchtitan's names" in refused(folder)


def test_an_index_that_would_run_code_is_read_without_running_it(tmp_path: Path) -> None:
    folder, weights, _ = written(tmp_path / "step-7")
    proof = tmp_path / "proof"
    index: Metadata = pickle.loads((folder / INDEX_NAME).read_bytes())
    index.planner_data = Attack(proof)
    index.storage_data[MetadataIndex("other")] = index.storage_data[next(iter(index.storage_data))]
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    imported = import_model(folder, tmp_path / "out", model=model_file(tmp_path))
    assert_equal(open_checkpoint(imported).load("model."), weights)
    assert not proof.exists()


class Attack:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (str(self.proof),)
