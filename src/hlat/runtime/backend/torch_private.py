"""Private names of PyTorch that differ between releases, and the releases that hlat was tested with.

    installed release --untested_torch_warning--> a warning at the start, or nothing
    state of FSDP2 --fsdp_parameter_groups--> its parameter groups, in every release

Any release may remove a private name. tests/support/runtime/torch_names.py lists each one that the code uses, with its
purpose. One test resolves all of them, another finds private names in the code that are missing there.
"""

from functools import cache
from inspect import signature
from typing import Any

from hlat.runtime.version import installed_version

TESTED_RELEASES = ("2.11", "2.13", "2.14")  # releases that passed the complete test suite


def fsdp_parameter_groups(state: Any) -> list[Any]:
    """Return FSDP2's parameter groups: any number from torch 2.12 on, at most one before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def most_graphs(count: int) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` for as many graphs as ``count``."""
    import torch  # noqa: PLC0415

    if "recompile_limit" in signature(torch.compile).parameters:
        return {"recompile_limit": count}
    from torch._dynamo import config  # noqa: PLC0415

    # 2.11 has no such argument, only a setting for all functions.
    config.recompile_limit = max(config.recompile_limit, count)
    return {}


@cache
def shapes_of_overrideable_backward() -> Any:
    """Let tensors without memory go through the backward pass of an accelerator's own attention."""
    import torch  # noqa: PLC0415
    from torch import _meta_registrations  # noqa: PLC0415

    if hasattr(_meta_registrations, "meta__scaled_dot_product_fused_attention_overrideable_backward"):
        return None

    # 2.11 has none.
    def shapes(gradient: Any, q: Any, k: Any, v: Any, bias: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        return (*map(torch.empty_like, (q, k, v)), None if bias is None else torch.empty_like(bias))

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_scaled_dot_product_fused_attention_overrideable_backward", shapes)
    return library  # which keeps the registration


def untested_torch_warning(installed: str | None = None) -> str:
    """Return a warning for an untested release such as ``2.13.0+cpu``; None reads the installed one without torch."""
    installed = installed or installed_version("torch")
    if not installed or _release(installed) in TESTED_RELEASES:
        return ""
    *others, last = TESTED_RELEASES
    tested = f"{', '.join(others)} and {last}"
    return (
        f"PyTorch {installed} is installed; hlat was tested with {tested} only. The run continues; check its results."
    )


def split_backward_problem(installed: str | None = None) -> str:
    """Return why this release cannot compute a pipeline's gradients by weight apart; empty if it can."""
    release = _release(installed or installed_version("torch"))
    if release not in ("2.11", "2.12"):
        return ""
    # The loss is such a function. 2.12.1 was tried: the first step of zbv on two ranks raises an error, in the backward
    # pass by weight of the last stage. 2.13 also corrects weights that a stage uses several times; models have none.
    return f"PyTorch {release} cannot split the backward pass at functions of Python."


def _release(installed: str) -> str:
    return ".".join(installed.split("+", maxsplit=1)[0].split(".")[:2])
