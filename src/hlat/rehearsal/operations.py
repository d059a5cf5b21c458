"""Observation of every operation on plain tensors, including backward passes and collectives.

operation -> executed -> observer(operation, arguments, result), in order of execution
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.runtime.distributed.fake_world import in_fake_world

Observer = Callable[[Any, tuple[Any, ...], Any], None]
"""Function of an operation, its arguments and its result."""


class OperationObserver(TorchDispatchMode):
    """Dispatch mode that reports operations of this thread, and of the backward passes it starts, to observers."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers
        self._in_fake_world = in_fake_world()
        self._inferring_shapes = 0  # depth of calls in which DTensor infers shapes, on tensors that use no memory
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        def infer_unobserved(*args: Any) -> Any:
            self._inferring_shapes += 1
            try:
                return infer(*args)
            finally:
                self._inferring_shapes -= 1

        self._shape_inference = patch.object(ShardingPropagator, infer.__name__, infer_unobserved)

    def __enter__(self) -> "OperationObserver":
        self._shape_inference.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._shape_inference.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches to operations on local tensors, which are seen here
        result = func(*args, **(kwargs or {}))
        on_host = self._in_fake_world and not in_fake_world()  # within ``host_values``
        if not self._inferring_shapes and not on_host:
            for observer in self._observers:
                observer(func, args, result)
        return result
