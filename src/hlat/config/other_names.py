"""Names and values of other programs, and what recipes call them.

Read by error messages only: a recipe that uses them is refused, with the name that works here. The names are those of
transformers' configurations and trainer, litgpt, nanoGPT, torchtitan, Megatron-LM and axolotl.
"""

from hlat.runtime.backend.table import OTHER_DEVICE_NAMES

FIELDS = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "min_lr": "schedule.min_ratio, a share of optimizer.lr",
    "weight_decay_rate": "optimizer.weight_decay",
    "beta1": "optimizer.betas, a list of two",
    "beta2": "optimizer.betas, a list of two",
    "adam_beta1": "optimizer.betas, a list of two",
    "adam_beta2": "optimizer.betas, a list of two",
    "adam_epsilon": "optimizer.eps",
    "grad_clip": "optimizer.clip_norm",
    "clip_grad": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "max_norm": "optimizer.clip_norm",
    "lr_scheduler_type": "schedule.kind",
    "lr_scheduler": "schedule.kind",
    "warmup_iters": "schedule.warmup_steps",
    "lr_warmup_steps": "schedule.warmup_steps",
    "warmup": "schedule.warmup_steps",
    "batch_size": "batch.global_batch (sequences per step) and batch.micro_batch (sequences per pass)",
    "global_batch_size": "batch.global_batch",
    "train_batch_size": "batch.global_batch",
    "micro_batch_size": "batch.micro_batch",
    "per_device_train_batch_size": "batch.micro_batch",
    "local_batch_size": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.global_batch: a step accumulates until it is reached",
    "accumulate_grad_batches": "batch.global_batch: a step accumulates until it is reached",
    "max_steps": "training.steps",
    "max_iters": "training.steps",
    "train_iters": "training.steps",
    "num_train_epochs": "training.steps or training.tokens; passes over the text follow from them",
    "num_epochs": "training.steps or training.tokens; passes over the text follow from them",
    "epochs": "training.steps or training.tokens; passes over the text follow from them",
    "max_tokens": "training.tokens",
    "logging_steps": "training.log_every",
    "log_interval": "training.log_every",
    "num_layers": "model.layers",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_embd": "model.hidden_size",
    "dim": "model.hidden_size",
    "d_model": "model.hidden_size",
    "hidden_dim": "model.hidden_size",
    "ffn_hidden_size": "model.intermediate_size",
    "ffn_dim": "model.intermediate_size",
    "num_attention_heads": "model.heads",
    "num_heads": "model.heads",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "num_query_groups": "model.kv_heads",
    "n_kv_heads": "model.kv_heads",
    "max_position_embeddings": "model.max_sequence_length",
    "rms_norm_eps": "model.norm_eps",
    "initializer_range": "model.init_std",
    "tie_word_embeddings": "model.tie_embeddings",
    "rope_theta": "model.rope.theta",
    "rope_scaling": "model.rope.scaling",
    "model_name": "model.preset, or model.from for a model that exists",
    "model_name_or_path": "model.from",
    "pretrained_model_name_or_path": "model.from",
    "base_model": "model.from",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "context_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "dataset_path": "data.path",
    "train_file": "data.path",
    "tokenizer_path": "data.tokenizer.path",
    "tokenizer_name": "data.tokenizer.path",
    "output_dir": "run.dir",
    "out_dir": "run.dir",
    "save_dir": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "the same command, which resumes by itself",
    "resume": "the same command, which resumes by itself",
    "eval_steps": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
    "dtype": "precision.mode",
    "torch_dtype": "precision.mode",
    "mixed_precision": "precision.mode=mixed",
    "bf16": "precision.mode=mixed",
    "fp16": "precision.mode=mixed, which is bfloat16",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "tensor_parallel_size": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "tp": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pp": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "cp": "parallel.context",
    "zero_stage": "parallel.zero",
    "data_parallel_size": "--nproc of hlat train: what is left of the processes shares the batch",
    "dp": "--nproc of hlat train: what is left of the processes shares the batch",
    "gpus": "--nproc of hlat train",
    "num_gpus": "--nproc of hlat train",
    "devices": "--nproc of hlat train",
    "nproc_per_node": "--nproc of hlat train",
    "num_nodes": "--nodes of hlat train",
    "nnodes": "--nodes of hlat train",
}
"""What a name of another program is called here: a field, or an option of ``hlat train``, with a note where needed."""

FIELDS_OF_SECTION = {
    ("parallel", "data"): "--nproc of hlat train: what is left of the processes shares the batch",
    ("batch", "size"): FIELDS["batch_size"],
    ("run", "output"): "run.dir",
    **{
        (f"optimizer.{kind}", name): "optimizer.kind, adamw or muon"
        for kind in ("adamw", "muon")  # the kind in force, adamw if none is given
        for name in ("name", "type", "optimizer", "algorithm")
    },
}
"""Names that mean this only in a section."""

VALUES = {("run.device", name): device for name, device in OTHER_DEVICE_NAMES.items()} | {
    ("precision.mode", "float32"): "fp32",
    ("precision.mode", "32"): "fp32",
    ("precision.mode", "float16"): "mixed",
    ("precision.mode", "fp16"): "mixed",
    ("precision.mode", "bfloat16"): "mixed",
    ("precision.mode", "bf16-mixed"): "mixed",
    ("precision.mode", "amp"): "mixed",
    ("optimizer.kind", "adam"): "adamw",
}
"""The value of a field that one of another program stands for."""

MAIN_FIELDS = {
    "run": "name",
    "model": "preset",
    "data": "path",
    "batch": "global_batch",
    "optimizer": "lr",
    "schedule": "warmup_steps",
    "training": "steps",
    "checkpoint": "every_steps",
    "evaluation": "every_steps",
    "precision": "mode",
    "parallel": "tensor",
    "memory": "activation_checkpointing",
    "data.tokenizer": "path",
    "data.validation": "fraction",
}
"""The field that a value most likely means if it stands where a section belongs."""

SECTIONS_OFF = {
    "data.tokenizer": "To train one on the corpus, leave it out, or write data.tokenizer.path=null.",
    "data.validation": "Write data.validation.fraction=0 to keep nothing aside for validation.",
    "evaluation": "Write evaluation.every_steps=null to evaluate nothing.",
}
"""What to write in place of a section that is null, by those who want to do without it."""

INSTEAD = {"data.path": "data.sources", "training.steps": "training.tokens", "training.tokens": "training.steps"}
"""The field that has to be given where another is null."""
