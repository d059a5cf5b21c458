"""Import and export: Hugging Face folder -> checkpoint -> Hugging Face folder, and loading models."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from hlat.checkpoint import collect, end_token_ids, export_hf, import_model, load_model
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import open_checkpoint, read_meta, resolve, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.cli.checkpoint import import_command
from hlat.config.sections.model import ModelConfig
from hlat.data.tokenizers.cutting import QWEN2_PATTERN
from hlat.model import Decoder, build, collect_local_parameters
from hlat.model.hf.folder import read_hf, write_hf
from hlat.optim.adamw import Fp32AdamW
from hlat.runtime.errors import CheckpointError, StorageError
from tests.support.checkpoint.saved_states import assemble, assert_equal
from tests.support.data.tokenizer_kinds import byte_bpe, load_made
from tests.support.model.canonical import to_canonical

FIELDS: dict[str, Any] = {
    "vocab_size": 40,
    "layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "heads": 4,
    "kv_heads": 2,
    "max_sequence_length": 64,
}
FAMILIES = {"llama": {}, "tied": {"tie_embeddings": True}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
EOS, BOS = 1, 2


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = {"<unk>": 0, "</s>": EOS, "<s>": BOS} | {f"w{index}": index for index in range(3, 40)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>", "<s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"})
    )
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a Hugging Face folder."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return assemble(collect(model.config, collect_local_parameters(model)))


def hf_folder(path: Path, tokenizer: Path, dtype: torch.dtype, **changes: Any) -> Path:
    config = ModelConfig.model_validate(FIELDS | changes)
    model = build(config, device="cpu", seed=3)
    canonical = to_canonical(config, dict(model.named_parameters()))
    return write_hf(path, config, canonical, dtype=dtype, tokenizer_dir=tokenizer, eos_id=EOS, bos_id=BOS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_of_an_import_equals_the_original(
    tmp_path: Path, tokenizer: Path, family: str, dtype: torch.dtype
) -> None:
    """All files are equal, byte for byte."""
    source = hf_folder(tmp_path / "source", tokenizer, dtype, **FAMILIES[family])
    checkpoint = import_model(source, tmp_path / "imported")
    assert verify_checkpoint(checkpoint) == []
    exported = export_hf(checkpoint, tmp_path / "exported")
    assert_equal(stored(exported), stored(source))
    assert {tensor.dtype for tensor in stored(exported).values()} == {dtype}
    assert {p.name: p.read_bytes() for p in exported.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}


@pytest.mark.parametrize("splits_like_qwen2", [False, True])
def test_a_run_with_biases_is_exported_with_the_ids_of_its_tokenizer(tmp_path: Path, splits_like_qwen2: bool) -> None:
    """Witness: transformers, which makes a tokenizer of its own for models of type qwen2."""
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.model_validate(FIELDS | {"qkv_bias": True, "vocab_size": 400})
    steps = [pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    like_qwen2 = {"pre_tokenizer": pre_tokenizers.Sequence(steps), "normalizer": normalizers.NFC()}
    ours = load_made(tmp_path / "given", byte_bpe(**(like_qwen2 if splits_like_qwen2 else {})))
    ours.save(tmp_path / "tokenizer")
    model = build(config, device="cpu", seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    files = {f"tokenizer/{file.name}": file for file in (tmp_path / "tokenizer").iterdir()}
    meta = {"recipe": {"model": config.model_dump(mode="json")}}
    CheckpointStore(tmp_path / "checkpoints", 1).save(1, collect(config, collect_local_parameters(model)), meta, files)
    exported = export_hf(tmp_path / "checkpoints", tmp_path / "exported")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    texts = ["Document 1: some words, é 東京 13.", "e\u0301 12345 (word)"]
    assert [theirs(text, add_special_tokens=False).input_ids for text in texts] == [ours.encode(t) for t in texts]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(loaded).__name__ == ("Qwen2ForCausalLM" if splits_like_qwen2 else "LlamaForCausalLM")
    ids = torch.tensor([ours.encode(texts[0])])
    # float32 sums of 40 terms at most in another order
    torch.testing.assert_close(loaded(ids).logits, model(ids), rtol=1e-4, atol=1e-5)
    again, _ = load_model(import_model(exported, tmp_path / "again"), "cpu")
    assert_equal(weights(again), weights(model))


def test_a_transformers_model_is_imported_and_exported(tmp_path: Path, tokenizer: Path) -> None:
    """Written by transformers in several shards and mixed dtypes; the export is loaded by transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=[EOS, 5],
        bos_token_id=BOS,
    )
    theirs = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    theirs.model.norm.float()
    theirs.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    for file in tokenizer.iterdir():
        (tmp_path / "source" / file.name).write_bytes(file.read_bytes())

    checkpoint = import_model(tmp_path / "source", tmp_path / "imported")
    assert read_meta(checkpoint)["step"] == 0
    assert end_token_ids(open_checkpoint(checkpoint)) == {EOS, 5}
    exported = export_hf(checkpoint, tmp_path / "exported")
    assert special_ids(exported) == special_ids(tmp_path / "source")
    assert special_ids(exported)["config.json"]["eos_token_id"] == [EOS, 5]
    assert_equal(stored(exported), stored(tmp_path / "source"))

    again = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(exported)("w3 w4 w39", return_tensors="pt").input_ids
    model, _ = load_model(checkpoint, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the dtype that bf16 and fp32 promote to"
    with torch.no_grad():
        # float32 in both: logits of 2 layers of width 24 agree to a few hundred roundings of 2^-24
        torch.testing.assert_close(model(tokens), again(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_can_be_exported_without_its_run(tmp_path: Path, tokenizer: Path) -> None:
    """The checkpoint has the model section, the tokenizer and the weights; neither run folder nor data is needed."""
    config = ModelConfig.model_validate(FIELDS | {"max_sequence_length": None})
    model = build(config, device="cpu", seed=3)
    optimizer = Fp32AdamW(model.parameters())
    files = {f"tokenizer/{file.name}": file for file in tokenizer.iterdir()}
    recipe = {"model": config.model_dump(mode="json"), "data": {"sequence_length": 48}}
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1)
    saved = store.save(
        7, collect(config, collect_local_parameters(model), optimizer), {"step": 7, "recipe": recipe}, files
    )
    saved.rename(tmp_path / "alone")
    exported = export_hf(tmp_path / "alone", tmp_path / "exported", dtype="bfloat16")
    fields, tensors = read_hf(exported)
    assert fields["max_sequence_length"] == 48
    expected = to_canonical(config, dict(model.named_parameters()))
    assert_equal(dict(tensors), {name: tensor.detach().bfloat16() for name, tensor in expected.items()})
    text = json.loads((exported / "config.json").read_text())
    assert (text["eos_token_id"], text["bos_token_id"]) == (EOS, BOS)
    loaded, meta = load_model(tmp_path / "alone", "cpu", torch.float64)
    assert meta["step"] == 7
    assert_equal(weights(loaded), {name: t.double() for name, t in weights(model).items()})


def test_the_command_suggested_after_an_import_names_its_tokenizer(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another tokenizer, training from the weights would read meaningless ids."""
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    import_command(source, tmp_path / "with")
    assert f"data.tokenizer.path={tmp_path / 'with' / 'tokenizer'}" in capsys.readouterr().out
    for file in source.glob("tokenizer*"):
        file.unlink()
    import_command(source, tmp_path / "without")
    assert "data.tokenizer.path" not in capsys.readouterr().out


def special_ids(folder: Path) -> dict[str, dict[str, Any]]:
    """Special token ids of a Hugging Face folder; null and a missing field mean the same."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    contents = {file: json.loads((folder / file).read_text()) for file in ("config.json", "generation_config.json")}
    return {file: {n: text[n] for n in names if text.get(n) is not None} for file, text in contents.items()}


def test_generation_ids_are_kept_apart_from_model_ids(tmp_path: Path, tokenizer: Path) -> None:
    """Chat models have more end tokens than config.json lists, and another padding token."""
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    (source / "tokenizer_config.json").unlink()  # then the export uses the first end token
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [EOS, 7], "pad_token_id": 9}))
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, 7, 8], "pad_token_id": 0, "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = import_model(source, tmp_path / "imported")
    exported = export_hf(checkpoint, tmp_path / "exported")
    assert special_ids(exported) == special_ids(source)
    assert special_ids(exported)["generation_config.json"]["eos_token_id"] == [EOS, 7, 8]
    assert end_token_ids(open_checkpoint(checkpoint)) == {EOS, 7, 8}
    assert json.loads((exported / "tokenizer_config.json").read_text())["eos_token"] == "</s>"


@pytest.mark.parametrize("invalid", [True, "</s>", -1, [], [1, None], {"id": 1}, 1.0])
def test_invalid_token_ids_are_left_out(tmp_path: Path, tokenizer: Path, invalid: object) -> None:
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    for name in ("config.json", "generation_config.json"):
        (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | {"eos_token_id": invalid}))
    exported = export_hf(import_model(source, tmp_path / "imported"), tmp_path / "exported")
    assert special_ids(exported) == {name: {"bos_token_id": BOS} for name in special_ids(exported)}


def test_the_error_for_a_full_disk_has_advice_for_an_import(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice on keep_last would be wrong, since there is no run."""
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    monkeypatch.setattr(Disk, "free_bytes", lambda *_: 1000)
    with pytest.raises(StorageError, match="free some space there, or name another folder to write to") as foreseen:
        import_model(source, tmp_path / "out")
    monkeypatch.setattr(Disk, "free_bytes", lambda *_: 1 << 40)
    monkeypatch.setattr(Disk, "write", full)
    with pytest.raises(StorageError, match="free some space there, or name another folder to write to") as met:
        import_model(source, tmp_path / "out")
    assert not any(word in f"{foreseen.value}{met.value}" for word in ("run.dir", "keep_last"))


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_import_does_not_overwrite_files(tmp_path: Path, tokenizer: Path) -> None:
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        import_model(source, tmp_path / "used")
    (tmp_path / "empty").mkdir()
    assert resolve(import_model(source, tmp_path / "empty")) == tmp_path / "empty"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "used", "empty", "tokenizer"}


def test_a_failed_import_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        import_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "tokenizer"}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "has no model section"),
        ({"model": "llama"}, "model: input should be a valid dictionary"),
        ({"model": {"layers": 2}}, "this version does not support its model section"),
        ({"model": FIELDS | {"experts": 8}}, "this version does not support its model section"),
        ({"model": FIELDS}, "has no weights"),
    ],
)
def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path, meta: dict[str, Any], message: str) -> None:
    path = CheckpointStore(tmp_path / "checkpoints", 1).save(1, replicated_chunks({"rng.torch": torch.zeros(3)}), meta)
    with pytest.raises(CheckpointError, match=message):
        load_model(path, "cpu")


def test_weights_that_do_not_fit_their_own_config_are_listed(tmp_path: Path) -> None:
    small = build(ModelConfig.model_validate(FIELDS), device="cpu", seed=0)
    meta = {"model": FIELDS | {"layers": 3}}
    path = CheckpointStore(tmp_path / "checkpoints", 1).save(
        1, collect(small.config, collect_local_parameters(small)), meta
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_proj\.weight: missing"):
        load_model(path, "cpu")
    with pytest.raises(CheckpointError, match=r"layers\.2\..*"):
        export_hf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_single_tensors_can_be_read(tmp_path: Path, tokenizer: Path) -> None:
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    checkpoint = open_checkpoint(import_model(source, tmp_path / "imported"))
    name = "model.model.norm.weight"
    assert_equal(checkpoint.read([name]), {name: stored(source)["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"has no tensor model\.other"):
        checkpoint.read([name, "model.other"])


def test_a_pickled_model_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    source = hf_folder(tmp_path / "source", tokenizer, torch.float32)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        import_model(source, tmp_path / "out")
    save_file({"unrelated": torch.zeros(1)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected"):
        import_model(source, tmp_path / "out")
