"""transformers loads exported folders and computes the same; importing and exporting its folders changes no tensor."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hlat.config import RecipeError
from hlat.config.sections.model import ModelConfig
from hlat.model.hf import folder as hf_write
from hlat.model.hf.folder import read_hf, write_hf
from hlat.model.parameter_layout import canonical_shapes
from hlat.runtime.errors import CheckpointError, StorageError
from tests.support.model.canonical import from_canonical, to_canonical
from tests.support.model.families import FAMILIES, config_of, implementations_of, our_model, tokens_of, twin

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")


def canonical_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in to_canonical(config, dict(our_model(config, dtype).named_parameters())).items()}


def contents(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_identical(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype
        assert torch.equal(second[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
@torch.no_grad()
def test_transformers_loads_an_export_and_computes_the_same_logits(
    tmp_path: Path, family: str, max_shard_bytes: int
) -> None:
    config = config_of(family)
    folder = write_hf(
        tmp_path / "out", config, canonical_of(config), eos_id=3, bos_id=1, max_shard_bytes=max_shard_bytes
    )
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **implementations_of(config)
    )
    assert not info["unexpected_keys"]
    assert set(info["missing_keys"]) <= {"lm_head.weight"}
    assert loaded.dtype == torch.float32
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.bos_token_id) == (3, 1)
    reference, tokens = twin(our_model(config), torch.float32), tokens_of(config)
    assert torch.equal(loaded.eval()(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_import_then_export_is_byte_identical(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """A folder saved by transformers is read, fused into hlat's model, unfused and written again."""
    config = config_of(family)
    source, again = tmp_path / "theirs", tmp_path / "ours"
    twin(our_model(config), dtype).save_pretrained(source, max_shard_size="60KB")
    fields, tensors = read_hf(source)
    read = ModelConfig.model_validate(fields)
    explicit = {"head_dim": config.n_head_dim, "kv_heads": config.n_kv_heads}  # config.json has no defaults
    assert read.model_copy(update=explicit) == config.model_copy(update=explicit)
    model = our_model(read, dtype)
    model.load_state_dict(from_canonical(read, tensors))
    write_hf(again, read, to_canonical(read, dict(model.named_parameters())))
    assert_identical(contents(again), contents(source))
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (source, again))
    assert second["architectures"] == first["architectures"]


def test_an_export_can_be_cast_and_streamed(tmp_path: Path) -> None:
    config = config_of("tied")
    tensors = canonical_of(config)
    folder = write_hf(tmp_path / "out", config, iter(tensors.items()), dtype=torch.bfloat16)
    assert_identical(contents(folder), {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_weight_that_float16_cannot_hold_is_not_exported_as_infinite(tmp_path: Path) -> None:
    config = config_of("tied")
    tensors = canonical_of(config)
    tensors["model.norm.weight"][3] = 7e4  # float16 ends at 65,504
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: has 7e\+04, and torch\.float16 ends at"):
        write_hf(tmp_path / "half", config, tensors, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    read = read_hf(write_hf(tmp_path / "out", config, tensors, dtype=torch.bfloat16))[1]
    assert read["model.norm.weight"][3].isfinite()


def test_shards_respect_the_maximum_size_and_are_indexed(tmp_path: Path) -> None:
    config = config_of("llama2-mha")
    folder = write_hf(tmp_path / "out", config, canonical_of(config), max_shard_bytes=60_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    for file in files:
        stored = load_file(folder / file)
        assert sum(t.nbytes for t in stored.values()) <= 60_000 or len(stored) == 1
        assert {name for name, shard in index["weight_map"].items() if shard == file} == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in contents(folder).values())


def test_a_byte_level_tokenizer_is_copied_and_works_in_transformers(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415  (used only here)

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the cat sat on the mat. " * 50], vocab_size=300, special_tokens=["<|end|>"])
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    config = config_of("llama2-mha", vocab_size=300)
    folder = write_hf(tmp_path / "out", config, canonical_of(config), tokenizer_dir=tmp_path / "tok", eos_id=0)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the cat,  sat\non wörds"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == "<|end|>"


def test_an_existing_folder_is_rejected_and_not_changed(tmp_path: Path) -> None:
    config = config_of("tied")
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="is not empty"):
        write_hf(tmp_path, config, canonical_of(config))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert write_hf(tmp_path / "empty", config, canonical_of(config)).is_dir()


@pytest.mark.parametrize("failing", ["save_file", "write_json"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_write, failing, full)
    config = config_of("tied")
    with pytest.raises(StorageError, match=r"No space left on device\. Free some space"):
        write_hf(tmp_path / "out", config, canonical_of(config), max_shard_bytes=60_000)
    assert list(tmp_path.iterdir()) == []


def test_unexpected_tensors_are_rejected_and_nothing_is_left_behind(tmp_path: Path) -> None:
    config = config_of("tied")
    tensors = canonical_of(config)
    tensors["lm_head.weight"] = tensors.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"(?s)model.norm.weight: missing.*lm_head.weight: unexpected"):
        write_hf(tmp_path / "out", config, tensors)
    with pytest.raises(RecipeError, match="max_sequence_length"):
        write_hf(tmp_path / "out", config.model_copy(update={"max_sequence_length": None}), canonical_of(config))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    config = config_of("llama2-mha")
    return write_hf(tmp_path / "model", config, canonical_of(config), max_shard_bytes=60_000)


def test_every_tensor_that_does_not_fit_is_listed(exported: Path) -> None:
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    shard = exported / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    tensors["model.stray.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, shard)
    save_file({"lm_head.weight": torch.zeros(5, 64)}, exported / index["weight_map"]["lm_head.weight"])
    del index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.stray.weight"] = shard.name
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        read_hf(exported)
    for problem in ("model.norm.weight: missing", "model.stray.weight: unexpected", "lm_head.weight: is 5 x 64"):
        assert problem in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 100, -1000, -1])
def test_a_truncated_shard_is_reported_by_name(exported: Path, keep: int) -> None:
    shard = sorted(exported.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{shard.name}: not a complete safetensors file"):
        read_hf(exported)


def test_a_pointer_is_no_damaged_shard(exported: Path) -> None:
    shard = sorted(exported.glob("*.safetensors"))[1]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=f"{shard.name}: this is a Git LFS pointer"):
        read_hf(exported)


def test_missing_files_are_reported_by_name(exported: Path) -> None:
    shards = sorted(exported.glob("*.safetensors"))
    for shard in shards[1:3]:
        shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name}, {shards[2].name}"):
        read_hf(exported)
    (exported / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"shards without model\.safetensors\.index\.json"):
        read_hf(exported)
    for shard in exported.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        read_hf(exported)
    (exported / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_hf(exported)


def test_an_index_cannot_point_outside_its_folder(exported: Path) -> None:
    outside = exported.parent / "secret.safetensors"
    shutil.copyfile(sorted(exported.glob("*.safetensors"))[0], outside)
    index = exported / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="is not a safetensors file in this folder"):
        read_hf(exported)


def test_pickled_weights_are_rejected_without_loading_them(exported: Path) -> None:
    for file in [*exported.glob("*.safetensors"), exported / "model.safetensors.index.json"]:
        file.unlink()
    (exported / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/hacked'\ntR.")
    with pytest.raises(CheckpointError, match=r"(?s)pickled weights.*save_pretrained"):
        read_hf(exported)


def test_redundant_tensors_of_old_files_are_ignored(tmp_path: Path) -> None:
    """Rotary frequencies as buffers are ignored, and a second copy of a tied head if it agrees, else it is an error."""
    config = config_of("tied")
    folder = write_hf(tmp_path / "model", config, canonical_of(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    _, read = read_hf(folder)
    assert list(read) == list(canonical_shapes(config))
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from model\.embed_tokens"):
        read_hf(folder)


def test_a_llama_with_attention_bias_is_imported_only_if_its_output_bias_is_zero(tmp_path: Path) -> None:
    settings = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_bias=True,
    )
    theirs = transformers.LlamaForCausalLM(settings)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
                parameter.normal_()
    theirs.save_pretrained(tmp_path / "zero")
    fields, tensors = read_hf(tmp_path / "zero")
    again = write_hf(tmp_path / "again", ModelConfig.model_validate(fields), tensors)
    back = transformers.AutoModelForCausalLM.from_pretrained(again)  # a Qwen2, which has exactly these biases
    tokens = torch.arange(20)[None]
    assert type(back).__name__ == "Qwen2ForCausalLM"
    assert torch.equal(back(tokens).logits, theirs.eval()(tokens).logits)
    with torch.no_grad():
        theirs.model.layers[1].self_attn.o_proj.bias[0] = 0.5
    theirs.save_pretrained(tmp_path / "nonzero")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.bias: is not zero"):
        read_hf(tmp_path / "nonzero")


@pytest.mark.parametrize("router", [1.0, None])
def test_a_router_that_chooses_among_one_expert_has_no_effect(tmp_path: Path, router: float | None) -> None:
    config = config_of("gpt-oss")
    folder = write_hf(tmp_path / "model", config, canonical_of(config))
    tensors = load_file(folder / "model.safetensors")
    routed = {name: tensor for name, tensor in tensors.items() if ".router." in name}
    assert len(routed) == 2 * config.layers and not any(tensor.any() for tensor in routed.values())
    kept = {name: tensor for name, tensor in tensors.items() if name not in routed}
    changed = {} if router is None else {name: tensor + router for name, tensor in routed.items()}
    save_file(kept | changed, folder / "model.safetensors")
    assert_identical(dict(read_hf(folder)[1]), canonical_of(config))


def test_a_fused_tensor_is_checked_under_its_own_name(tmp_path: Path) -> None:
    config = config_of("phi3")
    folder = write_hf(tmp_path / "model", config, canonical_of(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.qkv_proj.weight"] = torch.zeros(190, 64)
    del tensors["model.layers.0.mlp.gate_up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        read_hf(folder)
    assert "model.layers.1.self_attn.qkv_proj.weight: is 190 x 64, the model has 192 x 64" in str(error.value)
    assert "model.layers.0.mlp.gate_up_proj.weight: missing, expected 352 x 64" in str(error.value)
