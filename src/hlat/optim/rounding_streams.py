"""Random bits of stochastic rounding for the parameters of an optimizer.

    local parameters, seed, mode --RoundingStreams--> addresses of their elements, keys of their tensors in a step

Bits are addressed by seed, canonical name, step and position in the canonical tensor, so that every optimizer and every
layout draws the same for an element.
"""

import functools
from collections.abc import Sequence

import torch

from hlat.model import LocalParameter
from hlat.optim.base import counter_device
from hlat.optim.element_addresses import ElementAddresses, address_elements
from hlat.precision import step_keys, stream_keys

_PURPOSE = "rounding"  # random stream of bf16-sr
_MOMENTS_PURPOSE = "rounding of moments"  # random stream of the other modes, which round only moments stochastically


class RoundingStreams:
    """Addresses and keys of some parameters, computed when first used.

    Args:
        parameters: the parameters, all on one device.
        seed: seed of the random bits.
        mode: precision mode with bf16 weights.
    """

    def __init__(self, parameters: Sequence[LocalParameter], seed: int, mode: str) -> None:
        self._parameters, self._seed, self._mode = parameters, seed, mode

    def allocate(self) -> None:
        """Compute the tables."""
        _ = self.addresses, self._keys_2N, self._owners_N

    def keys(self, steps_P: torch.Tensor) -> torch.Tensor:
        """Compute the keys of all canonical tensors in a step: int32 of shape (2, N), on the parameters' device.

        Args:
            steps_P: step counter of each parameter, where counters are.
        """
        keys_2N = step_keys(self._keys_2N, steps_P[self._owners_N])
        return keys_2N.to(self._parameters[0].tensor.device, non_blocking=True)

    @functools.cached_property
    def addresses(self) -> list[ElementAddresses]:
        """Addresses of the elements of each parameter."""
        addresses: list[ElementAddresses] = []
        names = 0
        for parameter in self._parameters:
            addresses.append(address_elements(parameter, names))
            names += len(parameter.layout.tensors)
        return addresses

    @functools.cached_property
    def _device(self) -> torch.device:
        return counter_device(self._parameters[0].tensor.device)

    @functools.cached_property
    def _keys_2N(self) -> torch.Tensor:
        names = [canonical.name for each in self._parameters for canonical in each.layout.tensors]
        purpose = _PURPOSE if self._mode == "bf16-sr" else _MOMENTS_PURPOSE
        return stream_keys(self._seed, purpose, names, self._device)

    @functools.cached_property
    def _owners_N(self) -> torch.Tensor:
        """Index of the parameter of each canonical name."""
        owners = [index for index, each in enumerate(self._parameters) for _ in each.layout.tensors]
        return torch.tensor(owners, device=self._device)
