"""A recipe from the YAML configuration of NxDT (NeuronX Distributed Training).

    YAML --interpolations resolved--> settings --TRANSLATIONS, one for each--> fields of a recipe, notes
    --overrides, checks--> text of a recipe file with the notes as comments, and what is still missing

Interpolations are those of OmegaConf: ``${a.b}`` from the root, ``${.b}`` from the same section.

A name of TRANSLATIONS that ends in ``.*`` stands for a whole section. A setting that is not there is reported as
unknown: NxDT itself ignores unknown and misspelt settings silently.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hlat.config.errors import Problem, RecipeError
from hlat.config.explanations import suggestion
from hlat.config.load import parse_recipe
from hlat.config.model_base import PRESETS
from hlat.config.nxdt.rules import (
    Note,
    Rule,
    Translation,
    checkpointing,
    clip,
    decay_norms,
    default_betas,
    folder,
    isolation,
    kept,
    lost,
    megatron_data,
    only,
    optimizer,
    precision,
    schedule,
    split,
    to,
    token_folder,
    unneeded,
    validation_interval,
    virtual_stages,
    vocabulary,
    weight_decay,
    window,
    zero,
)
from hlat.config.yaml_files import apply_overrides, merge, read_file
from hlat.runtime.terminal import escape_controls

_REFERENCE = re.compile(r"\$\{(?P<dots>\.*)(?P<path>\w+(?:\.\w+)*)\}")
_DEEPEST_REFERENCE = 16  # references to references


def resolve_interpolations(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values that are one reference by what they refer to; others, and unresolvable ones, are kept."""
    return _resolved(content, content, ())


def _resolved(node: Mapping[str, Any], root: Mapping[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: _resolved(value, root, (*place, key))
        if isinstance(value, Mapping)
        else _resolved_value(value, root, place, 0)
        for key, value in node.items()
    }


def _resolved_value(value: Any, root: Mapping[str, Any], place: tuple[str, ...], depth: int) -> Any:
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    # References may form a cycle.
    if match is None or depth == _DEEPEST_REFERENCE:
        return value
    up = len(match["dots"])  # one dot means the section itself, two its parent
    start = place[: len(place) - up + 1] if up else ()
    path = (*start, *match["path"].split("."))
    found: Any = root
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return value
        found = found[name]
    return _resolved_value(found, root, path[:-1], depth + 1)


_EXPORTED = "checkpoints have everything, and hlat export writes any data type."
_HARDWARE = "the compiler and the runtime are the backend's matter, not the recipe's."
_ALWAYS = "always logged."
_KERNELS = "kernels are chosen by what the device has."
_ALIGNMENT = "fine-tuning, preference optimization and adapters are not hlat's: it pre-trains."
_EXPERTS = "hlat has no mixtures of experts."

TRANSLATIONS: dict[str, Rule] = {
    "name": to("run.name"),
    "model_source": unneeded("both kinds become the same recipe fields."),
    "seed": to("training.seed"),
    # trainer
    "trainer.devices": unneeded("the number of processes is given when the run is started (hlat check --world)."),
    "trainer.num_nodes": unneeded("the number of processes is given when the run is started (hlat check --world)."),
    "trainer.lnc": unneeded(_HARDWARE),
    "trainer.max_epochs": lost("the length of a run is training.steps or training.tokens.", -1),
    "trainer.max_steps": to("training.steps"),
    "trainer.log_every_n_steps": to("training.log_every"),
    "trainer.val_check_interval": validation_interval,
    "trainer.check_val_every_n_epoch": lost("validation is every evaluation.every_steps steps."),
    "trainer.num_sanity_val_steps": lost("hlat data prepare and hlat check find the mistakes that it is for.", 0),
    "trainer.limit_val_batches": unneeded("part of evaluation.sequences."),
    "trainer.limit_test_batches": unneeded("there is no test split."),
    "trainer.gradient_clip_val": clip,
    "trainer.sequential_move_factor": unneeded("a rank builds only its own part of the model."),
    # exp_manager
    "exp_manager.explicit_log_dir": to("run.dir"),
    "exp_manager.exp_dir": folder,
    "exp_manager.name": unneeded("the run has the configuration's name."),
    "exp_manager.create_tensorboard_logger": to("tracking.tensorboard"),
    "exp_manager.create_wandb_logger": lost("set tracking.wandb to the project of the run.", False),
    "exp_manager.create_mlflow_logger": lost("set tracking.mlflow to the experiment of the run.", False),
    "exp_manager.wandb_logger_kwargs.*": lost("see tracking.wandb.", {}),
    "exp_manager.mlflow_logger_kwargs.*": lost("see tracking.mlflow.", {}),
    "exp_manager.summary_writer_kwargs.*": unneeded("TensorBoard files are in <run.dir>/tensorboard."),
    "exp_manager.log_local_rank_0_only": unneeded("each rank has one log file."),
    "exp_manager.log_global_rank_0_only": unneeded("each rank has one log file."),
    "exp_manager.log_parameter_norm": unneeded(_ALWAYS),
    "exp_manager.log_gradient_norm": unneeded(_ALWAYS),
    "exp_manager.enable_recovery_time_instrumentation": unneeded("events.jsonl has the times of recovery."),
    "exp_manager.resume_if_exists": lost("the same folder always resumes; use another run.dir to start over.", True),
    "exp_manager.resume_ignore_no_checkpoint": unneeded("a run without checkpoint begins."),
    "exp_manager.resume_from_checkpoint": lost(
        "convert it with hlat import, then set checkpoint.init_from; optimizer state is not converted."
    ),
    "exp_manager.ckpt_ptl_version": unneeded(_EXPORTED),
    "exp_manager.create_checkpoint_callback": lost("the last step is always saved.", True),
    "exp_manager.checkpoint_callback_params.every_n_train_steps": to("checkpoint.every_steps"),
    "exp_manager.checkpoint_callback_params.save_top_k": kept,
    "exp_manager.checkpoint_callback_params.num_kept": kept,
    "exp_manager.checkpoint_callback_params.train_time_interval": lost(
        "checkpoints are saved by steps; snapshots by seconds (checkpoint.local)."
    ),
    "exp_manager.checkpoint_callback_params.monitor": lost("the newest checkpoints are kept.", "step"),
    "exp_manager.checkpoint_callback_params.mode": unneeded("the newest checkpoints are kept."),
    "exp_manager.checkpoint_callback_params.save_last": unneeded("the last step is always saved."),
    "exp_manager.checkpoint_callback_params.filename": unneeded("checkpoints are named by their step."),
    "exp_manager.checkpoint_callback_params.model_parallel_size": unneeded("checkpoints know no layout."),
    "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt": unneeded(_EXPORTED),
    "exp_manager.use_master_weights_in_ckpt": unneeded(_EXPORTED),
    "exp_manager.save_xser": unneeded(_EXPORTED),
    "exp_manager.load_xser": unneeded(_EXPORTED),
    "exp_manager.save_bf16": unneeded(_EXPORTED),
    "exp_manager.async_checkpointing": to("checkpoint.background"),
    # distributed_strategy
    "distributed_strategy.tensor_model_parallel_size": to("parallel.tensor"),
    "distributed_strategy.pipeline_model_parallel_size": to("parallel.pipeline"),
    "distributed_strategy.virtual_pipeline_model_parallel_size": virtual_stages,
    "distributed_strategy.context_parallel_size": to("parallel.context"),
    "distributed_strategy.zero1": zero,
    "distributed_strategy.sequence_parallel": to("parallel.sequence"),
    "distributed_strategy.kv_replicator": unneeded("key heads are copied as often as parallel.tensor needs."),
    "distributed_strategy.pipeline_model_parallel_split_rank": unneeded("decoders are not split at a rank."),
    "distributed_strategy.expert_model_parallel_size": only(_EXPERTS, 1),
    "distributed_strategy.token_shuffle_group_size": only(_EXPERTS, 1),
    # data
    "data.micro_batch_size": to("batch.micro_batch"),
    "data.global_batch_size": to("batch.global_batch"),
    "data.seq_length": to("data.sequence_length"),
    "data.train_dir": token_folder,
    "data.val_dir": to("data.validation.path"),
    "data.data_prefix": megatron_data,
    "data.index_mapping_dir": unneeded("order is a formula; nothing is stored."),
    "data.data_impl": only("hlat reads Megatron-LM's mmap datasets.", "mmap"),
    "data.splits_string": split,
    "data.skip_warmup": unneeded("files are mapped, not read, at the start."),
    "data.num_workers": unneeded("set data.workers if preparation is to use fewer cores."),
    "data.dataloader_type": lost("epochs are permuted anew each time.", "single"),
    "data.reset_position_ids": isolation,
    "data.reset_attention_mask": isolation,
    "data.eod_mask_loss": lost("the end-of-document token is a label like any other.", False),
    "data.validation_drop_last": unneeded("validation counts every token once."),
    "data.no_seqlen_plus_one_input_tokens": lost("each token but the first of a sample is a label.", False),
    "data.pad_samples_to_global_batch_size": lost("all batches are full.", False),
    "data.dev_choose_samples": lost("limit a source by data.sources.N.max_tokens."),
    "data.packing": lost("documents are always packed; see data.packing.", True),
    "data.tokenizer.type": to("data.tokenizer.path"),
    "data.tokenizer.model": to("data.tokenizer.path"),
    "data.tokenizer.library": unneeded("tokenizer.json and SentencePiece files are told apart by their content."),
    "data.tokenizer.vocab_file": lost("hlat reads tokenizer.json or a SentencePiece model."),
    "data.tokenizer.merge_file": lost("hlat reads tokenizer.json or a SentencePiece model."),
    "data.tokenizer.delimiter": unneeded("for tables only."),
    "data.tokenizer.sentencepiece_legacy": unneeded("the files of the tokenizer say what it does."),
    "data.tokenizer.use_fast": unneeded("the files of the tokenizer say what it does."),
    # model: Hugging Face style
    "model.model_config": to("model.hf_config"),
    "model.encoder_seq_length": to("data.sequence_length"),
    "model.max_position_embeddings": to("model.max_sequence_length"),
    "model.num_layers": to("model.layers"),
    "model.hidden_size": to("model.hidden_size"),
    "model.rope_theta": to("model.rope.theta"),
    "model.qkv_linear": unneeded("model.coalesce decides for all projections."),
    "model.fuse_qkv": unneeded("model.coalesce decides for all projections."),
    "model.transpose_nki_inputs": unneeded(_KERNELS),
    "model.use_cpu_initialization": unneeded("initial weights are always computed on the CPU."),
    "model.weight_init_only": unneeded("checkpoint.init_from loads weights only."),
    # model: Megatron style
    "model.ffn_hidden_size": to("model.intermediate_size"),
    "model.num_attention_heads": to("model.heads"),
    "model.num_kv_heads": to("model.kv_heads"),
    "model.kv_channels": to("model.head_dim"),
    "model.init_method_std": to("model.init_std"),
    "model.use_scaled_init_method": to("model.init_scaled_outputs"),
    "model.layernorm_epsilon": to("model.norm_eps"),
    "model.share_embeddings_and_output_weights": to("model.tie_embeddings"),
    "model.sliding_window_size": window,
    "model.make_vocab_size_divisible_by": vocabulary,
    "model.hidden_dropout": only("hlat trains without dropout.", 0),
    "model.attention_dropout": only("hlat trains without dropout.", 0),
    "model.ffn_dropout": only("hlat trains without dropout.", 0),
    "model.normalization": only("hlat's norms are RMSNorm.", "rmsnorm"),
    "model.position_embedding_type": only("positions are rotary embeddings.", "rope"),
    "model.rotary_percentage": only("hlat rotates whole heads.", 1),
    "model.activation": only("the feed-forward layer is SwiGLU.", "swiglu"),
    "model.transformer_block_type": only("norms are before each half of a block (olmo2: after).", "pre_ln"),
    "model.has_bias": only("projections have no biases; those of q, k and v are model.qkv_bias.", False),
    "model.apply_query_key_layer_scaling": unneeded("it scales scores and their softmax by the same number."),
    "model.persist_layer_norm": unneeded(_KERNELS),
    "model.moe.*": only(_EXPERTS, {}),
    "model.lora.*": only(_ALIGNMENT, {}),
    # memory and kernels
    "model.activations_checkpoint_granularity": checkpointing,
    "model.activations_checkpoint_recompute": unneeded("part of memory.activation_checkpointing."),
    "model.activations_checkpoint_method": unneeded("every block alike."),
    "model.activations_checkpoint_num_layers": lost("every block alike; or memory.budget_gib.", 1),
    "model.fusions.*": unneeded(_KERNELS),
    "model.pipeline_cuts": lost("stages are balanced by time and memory; parallel.split takes layers per stage."),
    # optimizer
    "model.optim.name": optimizer,
    "model.optim.lr": to("optimizer.lr"),
    "model.optim.weight_decay": weight_decay,
    "model.optim.betas": to("optimizer.betas"),
    "model.optim.eps": to("optimizer.eps"),
    "model.optim.capturable": unneeded(_HARDWARE),
    "model.do_layer_norm_weight_decay": decay_norms,
    "model.optim.sched.name": schedule,
    "model.optim.sched.warmup_steps": unneeded("part of schedule."),
    "model.optim.sched.max_steps": unneeded("part of schedule."),
    "model.optim.sched.min_lr": unneeded("part of schedule."),
    "model.optim.sched.constant_steps": unneeded("part of schedule."),
    "model.optim.sched.warmup_ratio": lost("give schedule.warmup_steps."),
    # precision
    "precision.type": precision,
    "precision.parallel_layers_reduce_dtype": lost("partial sums of tensor ranks are added in the dtype they have."),
    "precision.*": unneeded("part of precision.mode."),
    "model_alignment_strategy.*": only(_ALIGNMENT, {}),
    # compiler and runtime
    "compiler_flags": unneeded(_HARDWARE),
    "compiler_cache_url": unneeded(_HARDWARE),
    "aync_exec_max_inflight_requests": unneeded(_HARDWARE),
    "bucket_size_collectives": unneeded(_HARDWARE),
    "neuron_rt_exec_timeout": unneeded(_HARDWARE),
    "neuron_experimental_compress_rg": unneeded(_HARDWARE),
}

ABSENT: dict[str, Rule] = {
    "model.optim.betas": default_betas,
    "model.optim.sched.name": schedule,
    "trainer.gradient_clip_val": clip,
    "distributed_strategy.zero1": zero,
}
"""Settings whose default in NxDT is not hlat's, with the rule for a file that lacks them."""


_SECTIONS = {name.partition(".")[0] for name in TRANSLATIONS}
_COMMENT_WIDTH = 116  # of comment lines


@dataclass(frozen=True)
class TranslatedRecipe:
    """Sections of a recipe that was made from an NxDT configuration, and notes on its settings."""

    content: dict[str, Any]
    differs: tuple[Note, ...]  # settings that were translated to something that is not quite the same
    lost: tuple[Note, ...]  # settings without counterpart
    unneeded: tuple[Note, ...]  # settings that hlat needs no counterpart of
    # problems of the recipe as it is: what the user has to add or change before it can run
    missing: tuple[Problem, ...]
    world: int | None  # processes that the configuration ran on; None if it does not say

    def text(self, source: str) -> str:
        """Return the text of a recipe file; ``source`` is the name of the NxDT file."""
        lines = [f"Translated from {Path(source).name}, a configuration of NxDT.", *self._remarks()]
        comments = "".join(f"# {escape_controls(line)}\n" if line else "#\n" for line in lines)
        return comments + "\n" + yaml.safe_dump(self.content, sort_keys=False, allow_unicode=True, width=_COMMENT_WIDTH)

    def _remarks(self) -> Iterator[str]:
        lists = {
            "Not quite the same": self.differs,
            "Without counterpart": self.lost,
            "To be added or changed before it runs": self.missing,
        }
        for head, entries in lists.items():
            if entries:
                yield from ("", f"{head}:", *(f"  {entry}" for entry in entries))


def recipe_from_nxdt(path: str | Path, overrides: Sequence[str] = (), model: str | None = None) -> TranslatedRecipe:
    """Translate an NxDT configuration; overrides ``a.b=c`` change the recipe.

    ``model`` is a preset or config.json to take the model from, instead of the file's ``model.model_config``.

    Raises:
        RecipeError: the file is not an NxDT configuration, or describes a run that hlat cannot do; lists everything.
    """
    settings = dict(_settings(resolve_interpolations(read_file(Path(path), names=dict)), ""))
    # Names that any YAML file may have do not make it one of NxDT.
    if not {key.partition(".")[0] for key in settings} & (_SECTIONS - {"name", "data", "model", "precision"}):
        remedy = "NxDT's have trainer, exp_manager and distributed_strategy."
        raise RecipeError([Problem(str(path), "is no configuration of NxDT.", remedy)])
    translation = Translation(settings)
    for key, value in settings.items():
        _apply_rule(translation, key, value)
    for key, rule in ABSENT.items():
        if key not in settings:
            rule(translation, key, None)
    if translation.refused:
        raise RecipeError(translation.refused, str(path))
    if model is not None:
        translation.fields.pop("model.hf_config", None)
        translation.fields["model.preset" if model in PRESETS else "model.hf_config"] = model
    content, problems = apply_overrides(_nested(translation.fields), overrides)
    return TranslatedRecipe(
        content,
        tuple(translation.differs),
        tuple(translation.lost),
        tuple(translation.unneeded),
        (*problems, *_missing_fields(content)),
        _world(settings),
    )


def _settings(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        # A mapping is a setting of its own if a rule is for the whole of it.
        if (
            key in TRANSLATIONS
            or (f"{key}.*" in TRANSLATIONS and not _has_rules_below(key))
            or not isinstance(value, Mapping)
        ):
            yield key, value
        else:
            yield from _settings(value, f"{key}.")


def _has_rules_below(key: str) -> bool:
    return any(name.startswith(f"{key}.") and name != f"{key}.*" for name in TRANSLATIONS)


def _apply_rule(translation: Translation, key: str, value: Any) -> None:
    section = key.rpartition(".")[0]
    rule = TRANSLATIONS.get(key) or TRANSLATIONS.get(f"{key}.*") or TRANSLATIONS.get(f"{section}.*")
    if rule is None:
        hint = suggestion(key, TRANSLATIONS)
        translation.lose(key, f"not a setting that NxDT is known to read; it ignores others silently. {hint}".rstrip())
        return
    rule(translation, key, value)


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for path, value in fields.items():
        branch = value
        for name in reversed(path.split(".")):
            branch = {name: branch}
        content = merge(content, branch)
    return content


def _missing_fields(content: dict[str, Any]) -> Sequence[Problem]:
    try:
        parse_recipe(content)
    except RecipeError as error:
        return error.problems
    return ()


def _world(settings: Mapping[str, Any]) -> int | None:
    devices, nodes = settings.get("trainer.devices"), settings.get("trainer.num_nodes", 1)
    return devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None
