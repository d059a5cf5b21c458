"""Every operation on plain tensors, backward passes and collectives included, shown to whoever watches.

operation -> done -> observer(operation, arguments, result), in the order in which they were given
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.runtime.distributed import in_fake_world

Observer = Callable[[Any, tuple[Any, ...], Any], None]
"""Takes an operation, its arguments and what it returned."""


class OperationObserver(TorchDispatchMode):
    """Within the block, tells observers of what this thread does, and of the backward passes that it starts."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers
        self._pause = _Pause()
        self._pretended = in_fake_world()
        self._quiet = patch.object(ShardingPropagator, "_fake_mode_lock", self._pause)

    def __enter__(self) -> "OperationObserver":
        self._quiet.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._quiet.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes itself apart, into operations on local tensors, which come here again
        result = func(*args, **(kwargs or {}))
        on_host = self._pretended and not in_fake_world()  # within ``host_values``
        if not self._pause.depth and not on_host:
            for observer in self._observers:
                observer(func, args, result)
        return result


class _Pause:
    """In place of the lock that DTensor holds while it works out shapes, with tensors that stand for no memory."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
