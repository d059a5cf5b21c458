"""The state of a run as named tensors that know no layout and no coalescing.

    module and AdamW --collect--> model.<name>, optimizer.exp_avg.<name>, optimizer.exp_avg_sq.<name>,
                                  optimizer.step, rng.<source>
    checkpoint --restore--> the same module and AdamW, or ones with another coalescing, in place

``<name>`` is the canonical, Hugging Face name of a parameter; coalesced parameters and their moments are stored split.
Learning rate, betas and weight decay are not state: they follow from the recipe and the step.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hlat.checkpoint.reading import Checkpoint, open_checkpoint, resolve
from hlat.model import Decoder, parameter_layouts, to_canonical
from hlat.runtime import rng_state, set_rng_state

MODEL = "model."
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "optimizer.step"
RNG = "rng."

_READ_BYTES = 1 << 30


def collect(model: Decoder, optimizer: torch.optim.AdamW | None = None) -> dict[str, torch.Tensor]:
    """Everything that defines a run, by name; the weights alone without an optimizer.

    Split parameters are copies, the others are the live tensors: use the result before the next step.

    Returns:
        name -> tensor in its stored dtype, on the device it lives on.
    """
    state = {MODEL + name: tensor for name, tensor in to_canonical(model.config, _parameters(model)).items()}
    if optimizer is None:
        return state
    steps = _ensure_moments(model, optimizer)
    for moment in MOMENTS:
        canonical = to_canonical(model.config, _moments(model, optimizer, moment))
        state |= {f"optimizer.{moment}.{name}": tensor for name, tensor in canonical.items()}
    state[STEP] = torch.tensor(int(steps[0]), dtype=torch.int64)
    return state | {RNG + name: tensor for name, tensor in rng_state().items()}


def restore(checkpoint: Checkpoint, model: Decoder, optimizer: torch.optim.AdamW | None = None) -> None:
    """Put a saved state back, bit for bit; the inverse of ``collect``. Without an optimizer, the weights alone.

    Read a few parameters at a time: besides the state itself about 2 GiB are in memory.

    Raises:
        CheckpointError: lists every tensor that is missing, or differs in shape or dtype; nothing was changed then.
    """
    parts = {MODEL: _parameters(model)}
    if optimizer is not None:
        _ensure_moments(model, optimizer)
        parts |= {f"optimizer.{moment}.": _moments(model, optimizer, moment) for moment in MOMENTS}
    forms = {
        prefix + name: form for prefix, part in parts.items() for name, form in _canonical_forms(model, part).items()
    }
    if optimizer is not None:
        forms[STEP] = torch.empty((), dtype=torch.int64, device="meta")
    checkpoint.check(forms)
    for prefix, part in parts.items():
        _read_part(checkpoint, prefix, model, part)
    if optimizer is not None:
        step = checkpoint.read([STEP])[STEP]
        for entry in optimizer.state.values():
            entry["step"].fill_(step.item())
        set_rng_state(checkpoint.load(RNG))


def load_weights(path: Path, model: Decoder) -> None:
    """Fill a model with the weights of a checkpoint, whatever run or import they come from.

    Weights are converted to the model's dtype; bf16 to fp32 is exact.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder.
        model: filled in place.

    Raises:
        CheckpointError: nothing whole there, or the weights do not fit the model.
    """
    fill(open_checkpoint(resolve(path)), model)


def fill(checkpoint: Checkpoint, model: Decoder) -> None:
    """``load_weights`` from a checkpoint that was opened already."""
    saved = checkpoint.tensors
    forms = {MODEL + name: form for name, form in _canonical_forms(model, _parameters(model)).items()}
    checkpoint.check(
        {n: torch.empty_like(form, dtype=saved[n].dtype) if n in saved else form for n, form in forms.items()}
    )
    _read_part(checkpoint, MODEL, model, _parameters(model))


def _parameters(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _moments(model: Decoder, optimizer: torch.optim.AdamW, moment: str) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[parameter][moment] for name, parameter in model.named_parameters()}


def _ensure_moments(model: Decoder, optimizer: torch.optim.AdamW) -> list[float]:
    """Create the moments as AdamW would at its first step, where they do not exist. Returns each parameter's step."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in model.parameters():
        entry = optimizer.state[parameter]
        if not entry:
            on_device = groups[parameter]["fused"] or groups[parameter]["capturable"]
            entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            for moment in MOMENTS:
                entry[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    steps = [float(optimizer.state[parameter]["step"]) for parameter in model.parameters()]
    assert len(set(steps)) == 1, "every parameter takes part in every step"
    return steps


def _canonical_forms(model: Decoder, part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shapes and dtypes that a part has in a checkpoint, on the meta device."""
    return to_canonical(model.config, {name: tensor.to("meta") for name, tensor in part.items()})


def _read_part(checkpoint: Checkpoint, prefix: str, model: Decoder, part: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors under module names from the canonical ones of a checkpoint."""
    layouts = parameter_layouts(model.config)
    for group in _groups(part):
        canonical = checkpoint.read(prefix + name for ours in group for name in layouts[ours].canonical_shapes)
        for ours in group:
            pieces = {name: canonical[prefix + name] for name in layouts[ours].canonical_shapes}
            part[ours].copy_(layouts[ours].fuse(pieces))


def _groups(part: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names of a part, about ``_READ_BYTES`` at a time."""
    group: list[str] = []
    size = 0
    for name, tensor in part.items():
        if group and size + tensor.nbytes > _READ_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor.nbytes
    yield group
