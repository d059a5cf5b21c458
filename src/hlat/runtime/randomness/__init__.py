"""Random numbers addressed by (seed, purpose, element), and the state of stateful generators."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.randomness.generator_state import rng_state, seed_generators, set_rng_state
    from hlat.runtime.randomness.philox_rng import normal_block, philox
    from hlat.runtime.randomness.rng_keys import stream_key

__getattr__ = lazily(
    __name__,
    {
        "generator_state": (
            "rng_state",
            "seed_generators",
            "set_rng_state",
        ),
        "philox_rng": (
            "normal_block",
            "philox",
        ),
        "rng_keys": ("stream_key",),
    },
)

__all__ = ["normal_block", "philox", "rng_state", "seed_generators", "set_rng_state", "stream_key"]
