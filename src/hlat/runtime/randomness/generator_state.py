"""State of the stateful random generators of a process, as tensors and back.

hlat draws from addressed streams (``philox_rng.py``) and never from these generators. A library may use them, so their
states are saved: a resumed process then draws the same numbers as one that was never interrupted.

    torch CPU generator, generator of the current accelerator, ``random``, ``numpy.random`` <--> tensors
"""

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

from hlat.runtime.errors import CheckpointError

_MT_WORDS = 624  # words of state of a Mersenne twister: Python's and numpy's legacy generator
_PYTHON_VERSION = 3  # of the tuple that random.getstate() returns


def seed_generators(seed: int) -> None:
    """Seed every generator, so that the draws of libraries repeat with the run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator as copied CPU tensors.

    Returns:
        ``torch`` uint8, ``accelerator`` uint8 if there is one, ``python`` and ``numpy`` int64.
    """
    state = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state["accelerator"] = torch.get_device_module(accelerator).get_rng_state().cpu()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the states returned by ``rng_state``.

    The state of an accelerator is ignored on a machine without one, so that a run can move between device types.

    Raises:
        CheckpointError: a state does not fit its generator.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        torch.set_rng_state(state["torch"])
        _set_python_state(state["python"])
        _set_numpy_state(state["numpy"])
        if accelerator is not None and "accelerator" in state:
            torch.get_device_module(accelerator).set_rng_state(state["accelerator"])
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as exc:
        raise CheckpointError(f"the saved state of the random generators does not fit ({exc!r})") from exc


def _python_state() -> torch.Tensor:
    """int64: 624 words, position, 1 if a Gaussian is cached else 0, its bits."""
    version, internal, gauss = random.getstate()
    assert version == _PYTHON_VERSION, "the generator of every supported Python"
    return torch.tensor([*internal, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64)


def _set_python_state(state: torch.Tensor) -> None:
    *internal, has_gauss, gauss = state.tolist()
    random.setstate((_PYTHON_VERSION, tuple(internal), _float(gauss) if has_gauss else None))


def _numpy_state() -> torch.Tensor:
    """int64: 624 words, position, 1 if a Gaussian is cached else 0, its bits."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict) and state["bit_generator"] == "MT19937", "numpy's legacy generator"
    words, position = state["state"]["key"], state["state"]["pos"]
    return torch.tensor([*words.tolist(), position, state["has_gauss"], _bits(state["gauss"])], dtype=torch.int64)


def _set_numpy_state(state: torch.Tensor) -> None:
    *words, position, has_gauss, gauss = state.tolist()
    if len(words) != _MT_WORDS:
        raise ValueError(f"{len(words)} words of state instead of {_MT_WORDS}")
    key = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, _float(gauss)))


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
