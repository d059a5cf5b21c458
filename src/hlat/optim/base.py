"""The protocol of optimizers: everything that other rooms may ask, so that none of them knows which optimizer it is.

    optimizer section, precision mode --> OptimizerSpec: state of a parameter, what an update needs whole, its costs
        --build: local parameters, seed, access to whole matrices--> Optimizer: learning rate, state, step

Plans ask the ``OptimizerSpec``, which exists before any tensor; training, rehearsals and checkpoints ask the
``Optimizer`` that it builds. Both distinguish two kinds of parameters only: hidden matrices
(``RowLayout.is_hidden_matrix``: those of attention and feed-forward layers) and all others.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from hlat.config import OptimizerConfig, Problem
from hlat.model import LocalParameter, local
from hlat.runtime.backend.table import backend_of

RATE_FACTOR = "rate_factor"  # key in param_groups: of the schedule's learning rate
STEP = "step"  # name of the step counter in the state of a parameter: an fp32 scalar, not a state tensor
_SMALLEST_NORM = 1e-6  # added to a norm, as torch does
COUNTER_BYTES = 4  # bytes of the step counter of a parameter

MatrixFunction = Callable[[str, torch.Tensor], torch.Tensor]
"""Maps the canonical name and the values of a whole matrix (rows, columns) to a matrix of the same shape.

It may overwrite its argument."""


class WholeMatrices(Protocol):
    """Access to whole canonical matrices of which a process stores rows and columns only. All methods are collective.

    A fused parameter has several canonical matrices. Each is computed by one process, its owner.
    """

    def batches(self, parameters: Sequence[LocalParameter]) -> Iterator[Sequence[LocalParameter]]:
        """Split parameters into batches that are to be transformed together, to bound memory."""

    def shapes(self, parameter: LocalParameter) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole canonical matrices of a parameter, by name."""

    def transform(
        self, parameters: Sequence[LocalParameter], tensors: Sequence[torch.Tensor], function: MatrixFunction
    ) -> None:
        """Apply a function to whole matrices, in place.

        Args:
            parameters: a batch of parameters.
            tensors: this process's rows and columns of them, contiguous; receives those of the results.
            function: computes a matrix.
        """


def counter_device(device: torch.device) -> torch.device:
    """Return the device of step counters: with float64, in which scalars follow from them, else the host."""
    return device if backend_of(device).float64 else torch.device("cpu")


Method = TypeVar("Method", bound=Callable[..., Any])


def without_tracing(method: Method) -> Method:
    """Return a method of torch's optimizers without the wrappers that keep torch's compiler out of it."""
    # The wrappers import the compiler, a second of every start. Runs compile blocks, never their optimizer.
    unwrapped: Method = inspect.unwrap(method)
    return unwrapped


class LocalMatrices:
    """The ``WholeMatrices`` of a process that stores its parameters unsharded."""

    def batches(self, parameters: Sequence[LocalParameter]) -> Iterator[Sequence[LocalParameter]]:
        yield from ([each] for each in parameters)

    def shapes(self, parameter: LocalParameter) -> dict[str, tuple[int, ...]]:
        return parameter.layout.canonical_shapes

    def transform(
        self, parameters: Sequence[LocalParameter], tensors: Sequence[torch.Tensor], function: MatrixFunction
    ) -> None:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            layout = parameter.layout
            is_complete = tensor.shape == layout.shape and layout.row_size in (None, *layout.columns)
            assert is_complete, f"{parameter.name} is sharded: build the optimizer with ParallelModel.matrices"
            for block in parameter.row_blocks():
                rows = parameter.row_views(block, tensor)
                result = function(block.name, torch.cat(rows))  # a copy: the function may overwrite it
                for target, source in zip(rows, result.split([view.shape[0] for view in rows]), strict=True):
                    target.copy_(source)
                del result, source  # before the next matrix needs as much memory


class Optimizer(torch.optim.Optimizer, ABC):
    """An optimizer of the local parameters of a process.

    As with torch's optimizers, ``state`` is empty before the first step, and ``param_groups`` has the learning rates.
    The state of a parameter is the counter ``step`` and its state tensors, each of the shape of the parameter.
    """

    # names of the state tensors of all parameters; one parameter may have some of them only
    state_names: tuple[str, ...]
    add_param_group = without_tracing(torch.optim.Optimizer.add_param_group)
    zero_grad = without_tracing(torch.optim.Optimizer.zero_grad)

    @abstractmethod
    def init_state(self, parameter: torch.Tensor) -> None:
        """Create the state of a parameter, as its first step does, unless it exists: zeros."""

    def _create_zeros(self, parameter: torch.Tensor, names: Sequence[str]) -> None:
        state = self.state[parameter]
        if not state:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=counter_device(parameter.device))
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def allocate_state(self) -> None:
        """Create everything that the first step creates, unless it exists."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.init_state(parameter)

    @staticmethod
    def _evaluate(closure: Callable[[], Any] | None) -> Any:
        """Return the loss of ``step(closure)``; None without a closure."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step: the schedule's, whose peak is ``optimizer.lr``."""
        for group in self.param_groups:
            group["lr"] = rate * group.get(RATE_FACTOR, 1.0)

    def clip_gradients(self, norm: torch.Tensor, limit: float) -> None:
        """Scale the gradients by min(1, limit / norm), given the L2 norm over all ranks.

        The norm is an fp32 (or float64) scalar on their device.
        """
        # Like torch.nn.utils.clip_grads_with_norm_.
        self.scale_gradients((limit / (norm + _SMALLEST_NORM)).clamp(max=1.0))

    @torch.no_grad()
    def scale_gradients(self, scale: torch.Tensor) -> None:
        """Multiply the gradients of the next step by a scalar, in place unless the update can do it."""
        scale_in_place([each for group in self.param_groups for each in group["params"]], scale)

    def state_tensors(self, parameters: Sequence[LocalParameter]) -> dict[str, list[torch.Tensor | None]]:
        """Return the state by name: a local tensor per parameter, None for one without it; creates what is missing."""
        for each in parameters:
            self.init_state(each.parameter)
        states = [self.state[each.parameter] for each in parameters]
        return {name: [local(state[name]) if name in state else None for state in states] for name in self.state_names}

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return the numbers that are the same for all parameters, by name: the steps done, int64, and others."""
        steps = {float(state[STEP]) for state in self.state.values()}
        assert len(steps) == 1, "every parameter is updated in every step"
        return {STEP: torch.tensor(int(steps.pop()), dtype=torch.int64)}

    def load_numbers(self, numbers: Mapping[str, torch.Tensor]) -> None:
        """Take the numbers of a checkpoint; the state tensors exist."""
        for entry in self.state.values():
            entry[STEP].fill_(numbers[STEP].item())


Config = TypeVar("Config", bound=OptimizerConfig)


def scaled_groups(
    parameters: Sequence[LocalParameter], optimizer: OptimizerConfig, **values: float
) -> list[tuple[list[LocalParameter], dict[str, float]]]:
    """Group parameters, matrices first, by their row of the table of initial values and rates.

    Each group has options of ``param_groups``: its learning rate, and the values given here (``weight_decay``, ``eps``)
    times their factors.
    """
    groups: dict[tuple[float, ...], tuple[list[LocalParameter], dict[str, float]]] = {}
    for each in sorted(parameters, key=lambda each: each.parameter.ndim < 2):
        scale = each.scale(optimizer)
        options = {name: value * getattr(scale, name) for name, value in values.items()}
        options |= {"lr": optimizer.lr * scale.rate, RATE_FACTOR: scale.rate}
        groups.setdefault(tuple(options.values()), ([], options))[0].append(each)
    return list(groups.values())


def as_torch(groups: Sequence[tuple[Sequence[LocalParameter], dict[str, float]]]) -> list[dict[str, Any]]:
    """Return groups in the form that torch's optimizers take."""
    return [{"params": [each.parameter for each in members], **options} for members, options in groups]


def scale_in_place(parameters: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply the gradients of parameters by a scalar; those without one are skipped."""
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)


class OptimizerSpec(ABC, Generic[Config]):
    """Description of an optimizer, from the recipe alone."""

    # pydantic model of the section of the recipe, for an optimizer of the user's own
    Options: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    update_bytes: float  # bytes of memory that an update reads and writes per parameter, in fp32

    def __init__(self, config: Config, mode: str, in_hardware: bool = False) -> None:
        # in_hardware: the device rounds bf16-sr itself
        self.config, self.mode, self.in_hardware = config, mode, in_hardware

    def obstacles(self, sharded: bool) -> Iterator[Problem]:
        """Yield what keeps this optimizer from a run; ``sharded``: a process has parts of parameters."""
        yield from ()

    @abstractmethod
    def state_dtypes(self, hidden_matrix: bool) -> dict[str, torch.dtype]:
        """Return dtypes of the state tensors of a parameter by name.

        Args:
            hidden_matrix: True for a matrix of an attention or feed-forward layer.
        """

    @abstractmethod
    def build(
        self, parameters: Sequence[LocalParameter], seed: int = 0, matrices: WholeMatrices | None = None
    ) -> Optimizer:
        """Build the optimizer of a process.

        Args:
            parameters: the local parameters; bf16 in precision modes with bf16 weights.
            seed: seed of stochastic rounding.
            matrices: access to whole matrices; None if the process stores all parameters unsharded.
        """

    @abstractmethod
    def kernel(self, device: torch.device) -> str:
        """Name the kernel that updates the parameters on a device, for people."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors of all parameters, in the order of checkpoints."""
        return tuple(dict.fromkeys([*self.state_dtypes(hidden_matrix=False), *self.state_dtypes(hidden_matrix=True)]))

    def state_bytes(self, hidden_matrix: bool) -> int:
        """Bytes of the state tensors of one element of a parameter."""
        return sum(dtype.itemsize for dtype in self.state_dtypes(hidden_matrix).values())

    @property
    def matrix_dtype(self) -> torch.dtype | None:
        """Dtype in which hidden matrices are gathered, updated as a whole and returned; None if they need not be."""
        return None

    def matrix_flops(self, rows: int, columns: int) -> float:
        """FLOPs of matrix products of an update of a whole matrix."""
        return 0.0

    def matrix_bytes(self, rows: int, columns: int) -> float:
        """Bytes of temporary tensors while a whole matrix is updated, besides its argument."""
        return 0.0

    def element_bytes(self, elements: int) -> float:
        """Bytes of temporary tensors while a local parameter of so many elements is updated element by element."""
        return 0.0
