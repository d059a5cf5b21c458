"""Rules of the translation of NxDT's settings, and the translation while it is made.

    Translation, key, value --rule--> fields of a recipe, or a note on why there is none

``to``, ``unneeded``, ``lost`` and ``only`` make the simple rules of the table (``nxdt.py``); the functions below them
are rules that take more than a copy. Behaviour of NxDT that its documentation does not say was read in its source
(aws-neuron/neuronx-distributed-training).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlat.config.errors import Problem, short


@dataclass(frozen=True)
class Note:
    """A remark about a setting of NxDT."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"{self.key} = {short(self.value)}: {self.text}"


@dataclass
class Translation:
    """Fields of a recipe and notes, while they are made."""

    settings: Mapping[str, Any]  # by dotted key, interpolations resolved
    fields: dict[str, Any] = field(default_factory=dict)
    differs: list[Note] = field(default_factory=list)  # translated to something that is not quite the same
    lost: list[Note] = field(default_factory=list)  # without counterpart
    unneeded: list[Note] = field(default_factory=list)  # hlat needs no counterpart
    refused: list[Problem] = field(default_factory=list)

    def differ(self, key: str, text: str) -> None:
        self.differs.append(Note(key, self.settings.get(key), text))

    def lose(self, key: str, text: str) -> None:
        self.lost.append(Note(key, self.settings.get(key), text))

    def refuse(self, key: str, text: str) -> None:
        self.refused.append(Problem(key, text, "", self.settings.get(key), True))

    def number(self, key: str, otherwise: float) -> float:
        value = self.settings.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


Rule = Callable[[Translation, str, Any], None]
"""Translates a setting: (translation, key, value); the value may be None."""


def to(path: str) -> Rule:
    """Copy the value to a field; null is left out."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value is not None:
            translation.fields[path] = value

    return rule


def unneeded(reason: str) -> Rule:
    """Note that hlat needs no counterpart."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        translation.unneeded.append(Note(key, value, reason))

    return rule


def lost(reason: str, *harmless: Any) -> Rule:
    """Note that there is no counterpart, unless the value is null or one of the harmless ones."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value is not None and value not in harmless:
            translation.lose(key, reason)

    return rule


def only(reason: str, *possible: Any) -> Rule:
    """Refuse every value but null and the possible ones."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value is not None and value not in possible:
            translation.refuse(key, reason)

    return rule


_SCHED, _OPTIM, _TRAINER = "model.optim.sched", "model.optim", "trainer"
_MODES = {
    "bf16SR": "bf16-sr",
    "mixed_precision": "mixed",
    "autocast": "mixed",
    "fp32": "fp32",
}


def schedule(translation: Translation, key: str, value: Any) -> None:
    """Translate ``model.optim.sched.name`` with its numbers."""
    fields, steps = translation.fields, translation.number(f"{_TRAINER}.max_steps", 0)
    warmup, horizon = translation.number(f"{_SCHED}.warmup_steps", 0), translation.number(f"{_SCHED}.max_steps", steps)
    fields["schedule.warmup_steps"] = int(warmup)
    if horizon != steps:
        fields["schedule.horizon_steps"] = int(horizon)
    peak = translation.number(f"{_OPTIM}.lr", 0)
    floor = translation.number(f"{_SCHED}.min_lr", 0) / peak if peak else 0.0
    if value == "CosineAnnealing":
        fields |= {"schedule.kind": "cosine", "schedule.min_ratio": floor}
    # LinearAnnealingWithWarmUp is wsd whose decay begins when the warm-up ends.
    elif value == "LinearAnnealingWithWarmUp" and horizon > warmup:
        fields |= {"schedule.kind": "wsd", "schedule.min_ratio": 0.0, "schedule.decay_fraction": 1 - warmup / horizon}
    elif value in ("WarmupPolicy", "WarmupHold", None):
        fields["schedule.kind"] = "constant"
    else:
        fields["schedule.kind"] = "constant"
        translation.lose(key, "hlat has cosine, cosine-clipped, wsd and constant; the recipe says constant.")
    if translation.number(f"{_SCHED}.constant_steps", 0):
        translation.lose(f"{_SCHED}.constant_steps", "steps at the floor before the end; cosine reaches it at the end.")


def precision(translation: Translation, key: str, value: Any) -> None:
    """Translate ``precision.type`` and, for ``manual``, the switches below it."""
    field = "precision.mode"
    if value == "manual":
        translation.fields[field] = _manual_mode(translation)
        translation.differ(key, f"from the switches below it: {translation.fields[field]}.")
    elif value in ("mixed_precisionSR", "mixed_precision_SR"):
        translation.fields[field] = "mixed"
        reason = "fp32 weights need no stochastic rounding, which NxDT adds to products; hlat has none there."
        translation.differ(key, f"mixed: {reason}")
    elif value in _MODES:
        translation.fields[field] = _MODES[value]
    else:
        translation.refuse(key, f"unknown; NxDT has manual, mixed_precisionSR, {', '.join(_MODES)}.")
    if translation.fields.get(field) == "mixed" and translation.settings.get("distributed_strategy.zero1") is False:
        reason = "without ZeRO-1 NxDT silently keeps no fp32 weights and gradients; hlat's mixed mode always has them."
        translation.differ("distributed_strategy.zero1", reason)


def _manual_mode(translation: Translation) -> str:
    def is_on(name: str) -> bool:
        return str(translation.settings.get(f"precision.{name}")).lower() in ("1", "true")

    if is_on("xla_use_bf16"):
        return "bf16-sr" if is_on("neuron_rt_stochastic_rounding_en") else "bf16"
    if is_on("xla_downcast_bf16"):
        return "mixed" if is_on("master_weights") else "bf16"
    return "fp32"


def zero(translation: Translation, key: str, value: Any) -> None:
    """Translate ``distributed_strategy.zero1``; NxDT's default is true."""
    translation.fields["parallel.zero"] = 0 if value is False else 1


def virtual_stages(translation: Translation, key: str, value: Any) -> None:
    """Translate the number of model chunks of a pipeline rank."""
    if isinstance(value, int) and value > 1:
        translation.fields |= {"parallel.schedule": "interleaved-1f1b", "parallel.virtual_stages": value}


def checkpointing(translation: Translation, key: str, value: Any) -> None:
    """Translate the granularity of activation checkpointing."""
    policy = {"full": "full", "selective": "selective", None: "none"}.get(value)
    if policy is None:
        translation.refuse(key, "unknown; NxDT has full, selective and null.")
        return
    translation.fields["memory.activation_checkpointing"] = policy
    modules = translation.settings.get("model.activations_checkpoint_recompute")
    if policy == "selective" and modules != ["CoreAttention", "ActivationMultiplyMLP"]:
        reason = "selective recomputes core attention and the SwiGLU product, whatever the list says."
        translation.differ("model.activations_checkpoint_recompute", reason)


def optimizer(translation: Translation, key: str, value: Any) -> None:
    """Accept AdamW, refuse every other ``model.optim.name``."""
    if value not in ("adamw", "adamw_fp32OptState"):
        translation.refuse(key, "hlat has adamw and muon.")
    elif value == "adamw_fp32OptState" and translation.settings.get("precision.type") == "bf16SR":
        translation.differ(key, "hlat's bf16-sr keeps the moments in bf16.")


def default_betas(translation: Translation, key: str, value: Any) -> None:
    """Set the betas of a file that has none: torch's."""
    translation.fields["optimizer.betas"] = [0.9, 0.999]


def weight_decay(translation: Translation, key: str, value: Any) -> None:
    """Translate the weight decay, which NxDT's Hugging Face models ignore."""
    if value is None:
        return
    translation.fields["optimizer.weight_decay"] = value
    if translation.settings.get("model_source") == "hf" and value != 0.01:
        reason = "NxDT's Hugging Face models decay by 0.01 whatever is set; optimizer.weight_decay=0.01 repeats that."
        translation.differ(key, reason)


def decay_norms(translation: Translation, key: str, value: Any) -> None:
    """Translate the decay of norms, which NxDT's Hugging Face models invert."""
    translation.fields["optimizer.decay_norms"] = value is True
    if translation.settings.get("model_source") == "hf":
        reason = "NxDT's Hugging Face models do the opposite; the recipe has what the setting says."
        translation.differ(key, reason)


def clip(translation: Translation, key: str, value: Any) -> None:
    """Translate the clipping norm; 0 and null mean none."""
    translation.fields["optimizer.clip_norm"] = value or None


def validation_interval(translation: Translation, key: str, value: Any) -> None:
    """Translate the validation interval; one after the last step, or no batches, means no validation on the way."""
    batches, steps = translation.settings.get(f"{_TRAINER}.limit_val_batches"), f"{_TRAINER}.max_steps"
    never = batches == 0 or not isinstance(value, int) or value > translation.number(steps, float("inf"))
    translation.fields["evaluation.every_steps"] = None if never else value
    if isinstance(batches, int) and not isinstance(batches, bool) and batches > 0:
        global_batch = translation.number("data.global_batch_size", 1)
        translation.fields["evaluation.sequences"] = int(batches * global_batch)


def kept(translation: Translation, key: str, value: Any) -> None:
    """Translate the number of checkpoints that are kept; -1 keeps all."""
    every = translation.settings.get("exp_manager.checkpoint_callback_params.every_n_train_steps")
    if isinstance(value, int) and value > 0:
        translation.fields["checkpoint.keep_last"] = value
    # All are kept: every checkpoint is at a multiple of its period.
    elif value == -1 and every is not None:
        translation.fields["checkpoint.keep_every_steps"] = every


def token_folder(translation: Translation, key: str, value: Any) -> None:
    """Translate a dataset of token ids saved by ``datasets``, which NxDT reads in its order."""
    translation.fields |= {"data.path": value, "data.validation.fraction": 0.0}
    if not str(value).endswith((".jsonl", ".json", ".arrow")):
        translation.fields |= {"data.tokens_column": "input_ids", "data.shuffle": False}


def megatron_data(translation: Translation, key: str, value: Any) -> None:
    """Translate datasets of Megatron-LM: a prefix, or weights and prefixes in turn."""
    parts = value.get("train") if isinstance(value, dict) else value
    parts = [parts] if isinstance(parts, str) else parts
    if isinstance(value, dict):
        translation.differ(key, "its training part; name the validation part in data.validation.path.")
    if not isinstance(parts, list) or not parts:
        translation.refuse(key, "no datasets: give a prefix, or a list of weights and prefixes.")
    elif len(parts) == 1:
        translation.fields["data.path"] = f"{parts[0]}.bin"
    elif len(parts) == 2 and not isinstance(parts[0], str):
        translation.fields["data.path"] = f"{parts[1]}.bin"
    elif all(isinstance(part, str) for part in parts):
        translation.fields["data.sources"] = [{"path": f"{part}.bin"} for part in parts]
    elif len(parts) % 2 == 0:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        translation.fields["data.sources"] = [{"path": f"{path}.bin", "weight": weight} for weight, path in pairs]
    else:
        translation.refuse(key, "an odd number of weights and prefixes.")
    translation.differ(key, "samples are shuffled by another permutation than Megatron's.")


def split(translation: Translation, key: str, value: Any) -> None:
    """Translate ``splits_string``: shares of training, validation and test, in the order of the documents."""
    try:
        shares = [float(word) for word in str(value).split(",")]
        fraction = [*shares, 0.0][1] / sum(shares)
    except (ValueError, ZeroDivisionError, IndexError):
        translation.refuse(key, "not numbers with commas.")
        return
    translation.fields |= {"data.validation.fraction": fraction, "data.validation.by": "tail"}
    if len(shares) > 2 and shares[2]:
        translation.differ(
            key, "hlat has no test split: its share is trained on, and validation is the end of the data."
        )


def isolation(translation: Translation, key: str, value: Any) -> None:
    """Translate the options that keep documents apart; hlat has one for all of them."""
    names = ("reset_position_ids", "reset_attention_mask")
    if value and not translation.fields.get("data.isolate"):
        translation.fields["data.isolate"] = True
        if not all(translation.settings.get(f"data.{name}") for name in names):
            translation.differ(key, "data.isolate resets positions and attention both.")


def window(translation: Translation, key: str, value: Any) -> None:
    """Translate a sliding window, which makes the model a Mistral."""
    if value is not None:
        translation.fields |= {"model.architecture": "mistral", "model.sliding_window": value}


def folder(translation: Translation, key: str, value: Any) -> None:
    """Translate the folder of the experiment, below which NxDT makes one with the run's name."""
    name = translation.settings.get("exp_manager.name") or translation.settings.get("name") or "run"
    if value is not None:
        translation.fields.setdefault("run.dir", f"{str(value).rstrip('/')}/{name}")


def vocabulary(translation: Translation, key: str, value: Any) -> None:
    """Note that the vocabulary is the tokenizer's, rounded up."""
    # As in Megatron-LM, which pads to a multiple of this times the tensor-parallel degree.
    multiple = translation.number(key, 1) * translation.number("distributed_strategy.tensor_model_parallel_size", 1)
    reason = f"set model.vocab_size to the tokenizer's vocabulary, rounded up to a multiple of {multiple:.0f}."
    translation.differ(key, reason)
