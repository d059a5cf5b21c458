"""Configurations of NxDT become recipes that load, or it is said exactly what does not."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hlat.config import Recipe, RecipeError, load_recipe
from hlat.config.nxdt.recipes import recipe_from_nxdt
from hlat.optim.schedules import learning_rate
from tests.support.commands import hlat

# A run of the Hugging Face style, with the settings and interpolations that such files have.
HF = """
name: pretrain_llama
model_source: hf
seed: 4321
trainer:
  devices: 32
  num_nodes: 8
  max_epochs: -1
  max_steps: 20000
  log_every_n_steps: 20
  val_check_interval: 20001
  num_sanity_val_steps: 0
  limit_val_batches: 0.0
  gradient_clip_val: 1.0
exp_manager:
  create_tensorboard_logger: True
  explicit_log_dir: null
  exp_dir: /fsx/runs
  resume_if_exists: True
  checkpoint_callback_params:
    monitor: step
    save_top_k: 2
    filename: 'llama--{step}-{consumed_samples}'
    model_parallel_size: ${multiply:${distributed_strategy.tensor_model_parallel_size}, 1}
    every_n_train_steps: 500
  async_checkpointing: True
  resume_from_checkpoint: null
distributed_strategy:
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 1
  zero1: True
  sequence_parallel: True
  kv_replicator: 1
data:
  micro_batch_size: 1
  global_batch_size: 256
  train_dir: /fsx/tokens/train
model:
  model_config: /fsx/llama/config.json
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  activations_checkpoint_granularity: selective
  activations_checkpoint_recompute: [CoreAttention]
  fusions: {softmax: True, flash_attention: True}
  optim:
    name: adamw_fp32OptState
    lr: 3e-4
    weight_decay: 0.01
    betas: [0.9, 0.95]
    sched:
      name: CosineAnnealing
      warmup_steps: 2000
      max_steps: ${trainer.max_steps}
      min_lr: 3e-5
      constant_steps: 0
precision: {type: mixed_precision, master_weights: False}
compiler_flags: '--model-type transformer'
neuron_rt_exec_timeout: 100
"""
# A run of the Megatron style.
MEGATRON = """
name: megatron_run
model_source: megatron
trainer: {devices: 32, num_nodes: 1, max_steps: 5000, val_check_interval: 500, limit_val_batches: 2,
          gradient_clip_val: 1.0}
exp_manager: {explicit_log_dir: /fsx/mega, checkpoint_callback_params: {every_n_train_steps: 100, save_top_k: -1}}
distributed_strategy: {tensor_model_parallel_size: 8, zero1: True, sequence_parallel: True}
data:
  micro_batch_size: 1
  global_batch_size: 64
  data_prefix: [0.7, /data/web_text_document, 0.3, /data/code_text_document]
  splits_string: 980,10,10
  seq_length: ${model.encoder_seq_length}
  tokenizer: {library: huggingface, type: /data/tokenizer.json}
model:
  encoder_seq_length: 2048
  num_layers: 24
  hidden_size: 2048
  ffn_hidden_size: 5504
  num_attention_heads: 16
  num_kv_heads: 4
  init_method_std: 0.021
  use_scaled_init_method: True
  normalization: rmsnorm
  activation: swiglu
  layernorm_epsilon: 1e-5
  make_vocab_size_divisible_by: 8
  activations_checkpoint_granularity: full
  optim: {name: adamw, lr: 3e-4, weight_decay: 0.1, betas: [0.9, 0.95],
          sched: {name: CosineAnnealing, warmup_steps: 100, min_lr: 3e-5}}
precision: {type: bf16SR}
"""
HF_ANSWERS = ["data.tokenizer.path=t.json"]
MEGATRON_ANSWERS = ["model.vocab_size=32064"]


def changed(text: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Content of a file after some settings, by dotted key, were changed; ... removes one."""
    content = copy.deepcopy(yaml.safe_load(text))
    for path, value in changes.items():
        *sections, name = path.split(".")
        node = content
        for section in sections:
            node = node.setdefault(section, {})
        if value is ...:
            del node[name]
        else:
            node[name] = value
    return content


def at(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value


def write(folder: Path, content: dict[str, Any] | str) -> Path:
    path = folder / "nxdt.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# Ten configurations: the text, what is changed in it, expected fields, and settings that are said not to be the same.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], set[str]]] = {
    "hf pipeline": (
        HF,
        {},
        {
            "run.name": "pretrain_llama",
            "run.dir": "/fsx/runs/pretrain_llama",
            "parallel.tensor": 8,
            "parallel.pipeline": 4,
            "training.steps": 20000,
            "training.seed": 4321,
            "batch.global_batch": 256,
            "evaluation.every_steps": None,
            "checkpoint.every_steps": 500,
            "checkpoint.keep_last": 2,
            "data.sequence_length": 4096,
            "data.shuffle": False,
            "model.max_sequence_length": 4096,
            "memory.activation_checkpointing": "selective",
            "precision.mode": "mixed",
            "schedule.kind": "cosine",
            "optimizer.betas": (0.9, 0.95),
        },
        {"model.activations_checkpoint_recompute"},
    ),
    "linear decay, defects of the hugging face path": (
        HF,
        {
            "model.optim.sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 100, "max_steps": 20000},
            "model.optim.weight_decay": 0.1,
            "model.do_layer_norm_weight_decay": True,
        },
        {"schedule.kind": "wsd", "schedule.min_ratio": 0.0, "optimizer.weight_decay": 0.1},
        {
            "model.activations_checkpoint_recompute",
            "model.optim.weight_decay",
            "model.do_layer_norm_weight_decay",
        },
    ),
    "interleaved pipeline without zero": (
        HF,
        {
            "distributed_strategy.virtual_pipeline_model_parallel_size": 2,
            "distributed_strategy.zero1": False,
            "model.activations_checkpoint_granularity": None,
        },
        {
            "parallel.schedule": "interleaved-1f1b",
            "parallel.virtual_stages": 2,
            "parallel.zero": 0,
            "memory.activation_checkpointing": "none",
        },
        {"distributed_strategy.zero1"},
    ),
    "context parallel, validation, wandb": (
        HF,
        {
            "distributed_strategy.context_parallel_size": 2,
            "trainer.val_check_interval": 250,
            "trainer.limit_val_batches": 4,
            "data.val_dir": "/fsx/tokens/validation",
            "exp_manager.create_wandb_logger": True,
            "exp_manager.resume_from_checkpoint": "/fsx/old",
        },
        {
            "parallel.context": 2,
            "evaluation.every_steps": 250,
            "evaluation.sequences": 1024,
            "data.validation.path": "/fsx/tokens/validation",
        },
        {
            "model.activations_checkpoint_recompute",
            "exp_manager.create_wandb_logger",
            "exp_manager.resume_from_checkpoint",
        },
    ),
    "stochastic rounding and fp32 weights": (
        HF,
        {"precision.type": "mixed_precisionSR", "trainer.gradient_clip_val": ..., "model.optim.betas": ...},
        {"precision.mode": "mixed", "optimizer.clip_norm": None, "optimizer.betas": (0.9, 0.999)},
        {"model.activations_checkpoint_recompute", "precision.type"},
    ),
    "manual precision, misspelt and unknown settings": (
        HF,
        {
            "precision": {"type": "manual", "xla_use_bf16": "1", "neuron_rt_stochastic_rounding_en": "1"},
            "data.globl_batch_size": 3,
            "model.optim.sched.name": "NoamAnnealing",
        },
        {"precision.mode": "bf16-sr", "schedule.kind": "constant"},
        {
            "model.activations_checkpoint_recompute",
            "precision.type",
            "data.globl_batch_size",
            "model.optim.sched.name",
        },
    ),
    "megatron mixture": (
        MEGATRON,
        {},
        {
            "run.dir": "/fsx/mega",
            "model.layers": 24,
            "model.intermediate_size": 5504,
            "model.kv_heads": 4,
            "model.init_std": 0.021,
            "model.norm_eps": 1e-5,
            "data.validation.fraction": 0.01,
            "checkpoint.keep_every_steps": 100,
            "evaluation.every_steps": 500,
            "evaluation.sequences": 128,
            "memory.activation_checkpointing": "full",
            "precision.mode": "bf16-sr",
            "optimizer.weight_decay": 0.1,
            "parallel.sequence": True,
        },
        {"data.data_prefix", "data.splits_string", "model.make_vocab_size_divisible_by"},
    ),
    "megatron mistral, isolated documents": (
        MEGATRON,
        {
            "model.sliding_window_size": 1024,
            "data.reset_position_ids": True,
            "data.reset_attention_mask": True,
            "data.data_prefix": "/data/all",
            "data.splits_string": ...,
        },
        {
            "model.architecture": "mistral",
            "model.sliding_window": 1024,
            "data.isolate": True,
            "data.path": "/data/all.bin",
        },
        {"data.data_prefix", "model.make_vocab_size_divisible_by"},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "mixture of experts": (
        HF,
        {"model.moe": {"num_experts": 8, "top_k": 2}, "distributed_strategy.expert_model_parallel_size": 4},
        {"model.moe", "distributed_strategy.expert_model_parallel_size"},
    ),
    "gpt with fine-tuning": (
        MEGATRON,
        {
            "model.activation": "gelu",
            "model.normalization": "layernorm",
            "model.hidden_dropout": 0.1,
            "model.optim.name": "adafactor",
            "model_alignment_strategy": {"sft": {"packing": True}},
        },
        {
            "model.activation",
            "model.normalization",
            "model.hidden_dropout",
            "model.optim.name",
            "model_alignment_strategy",
        },
    ),
}
assert len(CASES) + len(REFUSED) == 10


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_a_recipe_that_loads(tmp_path: Path, name: str) -> None:
    text, changes, expected, noted = CASES[name]
    source = write(tmp_path, changed(text, changes) if changes else text)
    answers = HF_ANSWERS if text is HF else MEGATRON_ANSWERS
    found = recipe_from_nxdt(source, answers, "llama-2-7b" if text is HF else None)
    assert not found.missing
    assert {note.key for note in (*found.differs, *found.lost)} == noted
    file = tmp_path / "recipe.yaml"
    file.write_text(found.text(str(source)))
    recipe = load_recipe(file)
    assert {path: at(recipe, path) for path in expected} == expected
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert all(any(key in line for line in comments) for key in noted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_hlat_cannot_do_is_refused_with_every_reason(tmp_path: Path, name: str) -> None:
    text, changes, expected = REFUSED[name]
    with pytest.raises(RecipeError) as refused:
        recipe_from_nxdt(write(tmp_path, changed(text, changes)))
    assert {problem.path for problem in refused.value.problems} == expected


def test_sources_keep_their_weights(tmp_path: Path) -> None:
    found = recipe_from_nxdt(write(tmp_path, MEGATRON), MEGATRON_ANSWERS)
    sources = [
        {"path": "/data/web_text_document.bin", "weight": 0.7},
        {"path": "/data/code_text_document.bin", "weight": 0.3},
    ]
    assert found.content["data"]["sources"] == sources
    assert found.world == 32


def test_linear_decay_has_the_rates_of_nemos_formula(tmp_path: Path) -> None:
    """LinearAnnealingWithWarmUp: up to the peak, then (max_steps - step) / (max_steps - warmup_steps) of it."""
    text, changes, *_ = CASES["linear decay, defects of the hugging face path"]
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(
        recipe_from_nxdt(write(tmp_path, changed(text, changes)), HF_ANSWERS, "llama-2-7b").text("x")
    )
    recipe = load_recipe(recipe_file)
    for step in (50, 100, 101, 10_000, 20_000):
        expected = 3e-4 * min(step / 100, (20_000 - step) / (20_000 - 100))
        found = learning_rate(recipe.schedule, peak=3e-4, horizon=recipe.horizon_steps, step=step)
        assert found == pytest.approx(expected, rel=1e-12)


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    found = recipe_from_nxdt(write(tmp_path, MEGATRON))
    assert [problem.path for problem in found.missing] == ["model.vocab_size"]
    assert "model.vocab_size" in found.text("x").split("To be added or changed")[1]
    hf = recipe_from_nxdt(write(tmp_path, HF))
    assert {"model.hf_config", "data.tokenizer.path"} <= {problem.path for problem in hf.missing}


@pytest.mark.parametrize("text", ["a: 1", "model: {layers: 2}\ndata: {path: x}", "[1]", "trainer: ]", "x: ${y}\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError):
        recipe_from_nxdt(write(tmp_path, text))


def test_interpolations_that_refer_to_each_other_end(tmp_path: Path) -> None:
    content = changed(HF, {"seed": "${trainer.max_steps}", "trainer.max_steps": "${seed}"})
    found = recipe_from_nxdt(write(tmp_path, content), HF_ANSWERS, "llama-2-7b")
    assert {"training.steps", "training.seed"} <= {problem.path for problem in found.missing}


def test_the_command_writes_a_recipe_and_lists_what_differs(tmp_path: Path) -> None:
    source, target = write(tmp_path, HF), tmp_path / "recipe.yaml"
    words = ("recipe", "from-nxdt", source, "--to", target, "--model", "llama-2-7b", *HF_ANSWERS)
    done = hlat(*words)
    assert done.returncode == 0, done.stderr
    assert "model.activations_checkpoint_recompute" in done.stdout
    assert f"next: hlat check {target} --world 256" in done.stdout
    assert hlat("check", target, "--world", "256", "--no-files").returncode == 0  # the files are on the cluster
    again = hlat(*words)
    assert again.returncode != 0 and "exists" in again.stderr
