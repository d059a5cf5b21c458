"""Folders as people publish them: hlat computes the logits of transformers, or refuses by the name of what is wrong.

a random model of transformers -> one change of config.json, names, values or files -> logits of both, or an error
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hlat

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
TIED = {"tie_word_embeddings": True}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a random model of a family, once for each family and its options."""
    root, known = tmp_path_factory.mktemp("saved"), {}

    def save(family: str, **more: Any) -> Path:
        key = json.dumps([family, more])
        if key not in known:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(family, **{**SMALL, **more})
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():  # large, so that a wrong angle or mask changes logits
                    parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
            known[key] = root / str(len(known))
            model.save_pretrained(known[key])
        return known[key]

    return save


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (1, 150), generator=torch.Generator().manual_seed(1))


def ours(folder: Path) -> torch.Tensor | str:
    """Return hlat's logits, or the message of its refusal; any other exception is a failure."""
    try:
        return hlat.load_model(folder, dtype=torch.float32)(tokens()).detach()
    except hlat.HlatError as error:
        return str(error)


def theirs(folder: Path) -> torch.Tensor | None:
    """Return transformers' logits; None if it fails, or would fill in random weights."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        return None if info["missing_keys"] else model(tokens()).logits.detach()
    except Exception:  # of many kinds: whatever it cannot read
        return None


def assert_same(folder: Path) -> None:
    mine, reference = ours(folder), theirs(folder)
    assert isinstance(mine, torch.Tensor), mine
    # Logits are of order 10; two orders of the same float32 sums differ by some 1e-5.
    torch.testing.assert_close(mine, reference, rtol=0, atol=2e-3)


def edit(folder: Path, changes: dict[str, Any]) -> None:
    """Change fields of config.json; a value of ... removes one."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def stored(folder: Path) -> Tensors:
    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}


def store(folder: Path, tensors: Tensors, name: str = WEIGHTS) -> None:
    save_file({key: t.contiguous().clone() for key, t in tensors.items()}, folder / name, metadata={"format": "pt"})


def shards(folder: Path, scale: float = 1.0, keep: bool = False) -> dict[str, str]:
    """Split the weights, times a scale, into two shards with an index."""
    tensors, found = stored(folder), {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: tensors[key] * scale for key in sorted(tensors)[number - 1 :: 2]}
        store(folder, part, name)
        found |= dict.fromkeys(part, name)
    if not keep:
        (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return found


# ---- config.json: (what it changes, None if transformers' logits are right, else words of the refusal)

ROPE: list[tuple[dict[str, Any], str | None]] = [
    ({"rope_theta": 1e4, "rope_scaling": LINEAR}, None),
    ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, None),
    ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {**LINEAR, "rope_theta": 1e4}}, None),
    ({"rope_scaling": {**LINEAR, "rope_theta": 1e4}, "rope_parameters": None}, None),
    ({"rope_scaling": {}, "rope_parameters": {**LINEAR, "rope_theta": 5e5}}, None),
    ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 5e5}}, "whose rope_theta is 500000.0"),
    ({"rope_parameters": ..., "rope_scaling": {"factor": 4.0}}, "rope_scaling.rope_type"),
    ({"rope_parameters": ..., "rope_theta": None}, "rope_theta: is required"),
    ({"rope_parameters": ..., "rope_theta": "500000"}, "rope_theta = '500000'"),
    ({"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}}, "for each kind of layer"),
    ({"rope_parameters": ..., "original_max_position_embeddings": 128, "rope_scaling": LLAMA3}, None),
    (
        {
            "rope_parameters": ...,
            "original_max_position_embeddings": 128,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
        },
        None,
    ),
    ({"original_max_position_embeddings": 64, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, None),
    ({"rope_parameters": ..., "rope_scaling": YARN}, None),
    ({"rope_parameters": ..., "rope_scaling": {**YARN, "truncate": None, "beta_fast": None, "mscale": 0.5}}, None),
    ({"rope_parameters": {**YARN, "factor": None, "rope_theta": 5e5}}, None),
    ({"rope_parameters": {**YARN, "rope_theta": 1e4}, "original_max_position_embeddings": 32}, None),
    ({"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4, "rope_theta": 1e4}}, None),
    ({"rope_parameters": {**YARN, "attention_factor": 0.8, "rope_theta": 1e4}}, None),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, None),
    (
        {
            "rope_parameters": ...,
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "dynamic", "factor": 4},
        },
        None,
    ),
    ({"rope_scaling": {**YARN, "short_factor": [1.0]}}, "rope_scaling.short_factor"),
    ({"rope_parameters": ..., "rope_scaling": LLAMA3}, "original_max_position_embeddings: is required"),
    ({"rope_parameters": ..., "partial_rotary_factor": 0.5, "rope_scaling": LINEAR}, "whole heads are rotated"),
]
WINDOWS: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    "mistral": [
        ({"sliding_window": 32}, None),
        ({"sliding_window": 32, "layer_types": [FULL, FULL]}, None),
        ({"sliding_window": 32, "layer_types": ["attention", "attention"]}, None),
        ({"sliding_window": 32, "layer_types": [SLIDING, SLIDING]}, None),
        ({"sliding_window": 32, "layer_types": None}, None),
        ({"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}, None),
        ({"sliding_window": 32, "layer_types": [FULL, SLIDING]}, "layers with and without a window"),
        ({"sliding_window": 32, "layer_types": [FULL]}, "must be a list of 2 layers"),
        ({"sliding_window": 300, "layer_types": [FULL, SLIDING]}, None),
        ({"sliding_window": None, "layer_types": [SLIDING, SLIDING]}, "without a sliding_window"),
    ],
    "qwen2": [
        ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, None),
        ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 32}, None),
        ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 32, "max_window_layers": ...}, None),
        ({"layer_types": [FULL, FULL], "use_sliding_window": True, "sliding_window": 32}, None),
        ({"layer_types": ..., "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}, None),
        (
            {"layer_types": ..., "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            "layers with and without a window",
        ),
        (
            {
                "layer_types": [SLIDING, SLIDING],
                "use_sliding_window": True,
                "sliding_window": ...,
                "max_position_embeddings": 8192,
            },
            "models of this family have no window here",
        ),
    ],
}
OTHERS: list[tuple[dict[str, Any], str | None]] = [
    ({"is_causal": False}, "is_causal"),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    ({"rms_norm_eps": None}, "rms_norm_eps: is required"),
    ({"rms_norm_eps": "1e-05"}, "rms_norm_eps = '1e-05'"),
    ({"vocab_size": 60}, "model.embed_tokens.weight: is 64 x 32, the model has 60 x 32"),
    ({"architectures": ["LlamaForSequenceClassification"], "pretraining_tp": 2}, None),
]
CONFIGS = [
    *(("llama", *case) for case in ROPE + OTHERS),
    *((family, *case) for family, cases in WINDOWS.items() for case in cases),
]


@pytest.mark.parametrize(("family", "changes", "refusal"), CONFIGS)
def test_config_json(
    tmp_path: Path, saved: Callable[..., Path], family: str, changes: dict[str, Any], refusal: str | None
) -> None:
    folder = shutil.copytree(saved(family), tmp_path / "model")
    edit(folder, changes)
    if refusal is None:
        assert_same(folder)
    else:
        assert refusal in str(ours(folder))


# ---- files and tensors: (name, change of a folder, options of the model, None or words of the refusal)


def _changed(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = stored(folder)
        store(folder, change(tensors) or tensors)

    return apply


def _cast(dtype: torch.dtype, part: str = "proj.weight") -> Callable[[Path], None]:
    return _changed(lambda tensors: {name: t.to(dtype) if part in name else t for name, t in tensors.items()})


def _shards_of_two_saves(folder: Path) -> None:
    names = shards(folder)
    first, second = sorted(set(names.values()))
    twice = min(name for name in names if names[name] == first)
    value = load_file(folder / first)[twice] * 0.5
    store(folder, {**{k: t.clone() for k, t in load_file(folder / second).items()}, twice: value}, second)


def _index_names_another_shard(folder: Path) -> None:
    names = shards(folder)
    names[min(names)] = max(names.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _only_the_index(folder: Path) -> None:
    for name in set(shards(folder).values()):
        (folder / name).unlink()


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def _byte_order_mark(folder: Path) -> None:
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def _gone(file: Path) -> None:
    """Leave a link to nowhere, as in a folder of the hub's cache whose blob was deleted."""
    file.unlink()
    file.symlink_to("../../blobs/gone")


CHANGES: list[tuple[str, Callable[[Path], Any], dict[str, Any], str | None]] = [
    ("shards", shards, {}, None),
    ("an old index and its shards beside a new file", lambda folder: shards(folder, 0.5, keep=True), {}, None),
    ("an index without its shards", _only_the_index, {}, "shards listed in the index are missing"),
    ("a tensor in two shards", _shards_of_two_saves, {}, "lm_head.weight: in model-00001"),
    ("an index that names another shard", _index_names_another_shard, {}, None),
    ("shards without an index", lambda f: (shards(f), (f / INDEX).unlink()), {}, "shards without " + INDEX),
    ("other pickled weights", lambda f: torch.save({QUERY: torch.ones(32, 32)}, f / "pytorch_model.bin"), {}, None),
    ("an adapter beside", _adapter, {}, "has an adapter"),
    ("an adapter alone", lambda f: (_adapter(f), (f / WEIGHTS).unlink()), {}, "only an adapter"),
    (
        "a Git LFS pointer",
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        {},
        "git lfs pull",
    ),
    (
        "safetensors/safetensors#414",
        lambda f: torch.save(stored(f), f / WEIGHTS),
        {},
        "this is weights of torch.save, a zip",
    ),
    (
        "kohya-ss/sd-scripts#990",
        lambda f: torch.save(stored(f), f / WEIGHTS, _use_new_zipfile_serialization=False),
        {},
        "weights of torch.save, a pickle. Loading it can run code",
    ),
    ("debpalash/VoiceStudio#1056", lambda f: _gone(f / WEIGHTS), {}, f"{WEIGHTS}: a link to ../../blobs/gone"),
    ("the same of config.json", lambda f: _gone(f / "config.json"), {}, "config.json is a link to ../../blobs/gone"),
    (
        "huggingface/huggingface_hub#1388",
        lambda f: (shards(f), [_gone(each) for each in f.glob("model-00001*")]),
        {},
        "(a link to ../../blobs/gone, which does not exist)",
    ),
    ("Wangbenzhi/RealisHuman#11", lambda f: (f / "config.json").unlink(), {}, "without its config.json. Fetch that"),
    ("tied, as lm_head", _changed(lambda t: t.update({HEAD: t.pop(EMBEDDING)})), TIED, None),
    ("tied, both", _changed(lambda t: t.update({HEAD: t[EMBEDDING]})), TIED, None),
    ("tied, both, other", _changed(lambda t: t.update({HEAD: t[EMBEDDING] * 0.5})), TIED, "lm_head.weight: differs"),
    ("tied, neither", _changed(lambda t: t.pop(EMBEDDING) is None), TIED, "model.embed_tokens.weight: missing"),
    ("tied, undeclared", lambda f: edit(f, {"tie_word_embeddings": ...}), TIED, "lm_head.weight: missing"),
    ("float8", _cast(torch.float8_e4m3fn), {}, "and 13 more: of the data type F8_E4M3"),
    ("all float8", _cast(torch.float8_e5m2, ""), {}, "of the data type F8_E5M2"),
    ("int8", _cast(torch.int8), {}, "of the data type I8"),
    ("bool", _cast(torch.bool, QUERY), {}, f"{QUERY}: of the data type BOOL"),
    ("bfloat16 and float32", _cast(torch.bfloat16), {}, None),
    ("float16 and float64", lambda f: (_cast(torch.float16)(f), _cast(torch.float64, "norm")(f)), {}, None),
    ("a scale", _changed(lambda t: t.update({QUERY + "_scale": torch.ones(1)})), {}, "q_proj.weight_scale: unexpected"),
    ("a prefix", _changed(lambda t: {f"_orig_mod.{n}": v for n, v in t.items()}), {}, f"_orig_mod.{QUERY}: unexpected"),
    (
        "transposed",
        _changed(lambda t: {n: v.T if v.ndim == 2 else v for n, v in t.items()}),
        {},
        "is 32 x 64, the model has 64 x 32",
    ),
]


@pytest.mark.parametrize(("change", "options", "refusal"), [case[1:] for case in CHANGES], ids=[c[0] for c in CHANGES])
def test_files_and_tensors(
    tmp_path: Path,
    saved: Callable[..., Path],
    change: Callable[[Path], Any],
    options: dict[str, Any],
    refusal: str | None,
) -> None:
    folder = shutil.copytree(saved("llama", **options), tmp_path / "model")
    change(folder)
    if refusal is None:
        assert_same(folder)
    else:
        assert refusal in str(ours(folder))


def test_config_json_with_a_byte_order_mark_is_read(tmp_path: Path, saved: Callable[..., Path]) -> None:
    """Transformers 5.23 refuses the mark; the file means the same without it."""
    folder = shutil.copytree(saved("llama"), tmp_path / "model")
    reference = theirs(folder)
    _byte_order_mark(folder)
    torch.testing.assert_close(ours(folder), reference, rtol=0, atol=2e-3)


FIELDS: dict[str, list[Any]] = {
    "num_key_value_heads": [..., None],
    "tie_word_embeddings": [..., True],
    "rms_norm_eps": [..., 0],
    "hidden_act": [..., "swish", "gelu", "SiLU"],
    "head_dim": [..., None, 8],
    "rope_theta": [..., 500000, 0],
    "rope_scaling": [{"rope_type": kind, "factor": 4.0} for kind in ("dynamic", "yarn", "longrope", "ntk", None)]
    + [{**YARN, name: value} for name in ("beta_fast", "mscale", "factor") for value in (None, 0, 2, True, "4")],
    "attention_bias": [True, None, "false"],
    "mlp_bias": [True, False],
    "attention_dropout": [0.1],
    "sliding_window": [..., 0, -1, 32, 149, 150, 256],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2, 28],
    "layer_types": [..., None, [], [FULL, FULL], [SLIDING, SLIDING], [FULL, SLIDING], ["chunked_attention"] * 2],
    "attn_logit_softcapping": [50.0],
    "torch_dtype": ["float8_e4m3fn", "int8", "bfloat16"],
    "vocab_size": [60, 70],
    "num_hidden_layers": [1, 3],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}, {}],
    "max_position_embeddings": [..., "256"],
    "auto_map": [{"AutoModelForCausalLM": "modeling.X"}],
    "model_type": [..., "LLAMA", "gemma2", "ministral"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [False, True])
def test_any_field_is_read_as_transformers_reads_it_or_refused(
    tmp_path: Path, saved: Callable[..., Path], family: str, window: bool
) -> None:
    base = {"sliding_window": 32, "use_sliding_window": True} if window else {}
    cases = [{**base, name: value} for name, values in FIELDS.items() for value in values]
    cases += [changes for changes, _ in ROPE + OTHERS + WINDOWS["mistral"] + WINDOWS["qwen2"]]
    for number, changes in enumerate(cases):
        folder = shutil.copytree(saved(family), tmp_path / str(number))
        edit(folder, changes)
        mine, reference = ours(folder), theirs(folder)
        if isinstance(mine, torch.Tensor) and reference is not None:
            assert (mine - reference).abs().max() < 2e-3, (family, changes)
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_folder_is_read_as_transformers_reads_it_or_refused(
    tmp_path: Path, saved: Callable[..., Path], family: str
) -> None:
    for number, (name, change, options, _) in enumerate(CHANGES):
        folder = shutil.copytree(saved(family, **options), tmp_path / str(number))
        change(folder)
        mine, reference = ours(folder), theirs(folder)
        if isinstance(mine, torch.Tensor) and reference is not None:
            assert (mine - reference).abs().max() < 2e-3, (family, name)
