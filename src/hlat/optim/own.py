"""Optimizers of the user's own, and those of torch.optim by name.

    optimizer.kind: package.module:Name --own_spec--> the user's OptimizerSpec
                                                   or ElementwiseSpec of a torch.optim.Optimizer
    class, options --small steps (``Trial``)--> names and dtypes of its state; what is wrong with it
    local parameters --ElementwiseSpec.build--> ElementwiseOptimizer, around the optimizer of plain local tensors

A ``torch.optim.Optimizer`` says nothing of its state, so it takes a few steps on a small matrix and a vector first:

    state          tensors of the parameter's shape are saved and sharded as the parameter is; numbers, alike for all
                   parameters, are saved once
    resume         steps with the state loaded into a new object give the same bits as those without interruption
    sharding       steps on halves of rows and of columns give those on the whole; else it is refused where parameters
                   are sharded

The learning rate is the schedule's, through ``param_groups``. Weights are fp32: bf16 ones are rounded by the update
itself, which such a class does not do.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hlat.config import OwnOptimizerConfig, Problem, RecipeError, own_parts
from hlat.model import LocalParameter
from hlat.optim.base import STEP, Optimizer, OptimizerSpec, WholeMatrices, counter_device, scaled_groups
from hlat.precision import AUTO, MODES
from hlat.runtime.distributed.join import host_values, in_fake_world

_PATH = "optimizer.kind"
_OF_HLAT = ("lr", "decay_norms", "clip_norm", "z_loss")  # fields of the section that are not the optimizer's options
_REMEDY = "docs/extend.md says what works; hlat.optim.OptimizerSpec takes any optimizer."
_WEIGHT_DECAY = "weight_decay"
_TOLERANCE = 1e-4  # of an update, relative to the largest: kernels round ends of tensors otherwise than their middle

Number = bool | int | float
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def own_spec(config: OwnOptimizerConfig, mode: str, in_hardware: bool = False) -> OptimizerSpec[Any]:
    """Return the description of an optimizer of the user's own; RecipeError if there is none, or it does not work."""
    wanted = "a subclass of torch.optim.Optimizer or hlat.optim.OptimizerSpec"
    part = own_parts.load_part(own_parts.OPTIMIZERS, _PATH, config.kind, wanted, _is_optimizer)
    if issubclass(part, OptimizerSpec):
        fields = config.model_dump(exclude={"kind"})
        made: OptimizerSpec[Any] = part(own_parts.read_options(part.Options, fields, "optimizer"), mode, in_hardware)
        return made
    return _elementwise(part, config, mode, in_hardware)


def _is_optimizer(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, torch.optim.Optimizer | OptimizerSpec)


@dataclass(frozen=True)
class Trial:
    """Result of small steps of an optimizer."""

    matrix: Mapping[str, torch.dtype]  # state tensors of a matrix, by name
    vector: Mapping[str, torch.dtype]  # state tensors of a vector, by name
    numbers: Mapping[str, Any]  # other state, as it was after the first step: tensors of one element, or numbers
    depends_on_shards: str = ""  # why the update depends on how a parameter is sharded; empty if it does not


class ElementwiseSpec(OptimizerSpec[OwnOptimizerConfig]):
    """A ``torch.optim.Optimizer``, described by a trial."""

    def __init__(
        self, part: type[torch.optim.Optimizer], config: OwnOptimizerConfig, mode: str, in_hardware: bool = False
    ) -> None:
        super().__init__(config, mode, in_hardware)
        self._part = part
        options = own_parts.options_class(part, given=("params", "lr"))
        values = own_parts.read_options(options, config.own_options, "optimizer", also=_OF_HLAT).model_dump()
        self._weight_decay = values.pop(_WEIGHT_DECAY, None)  # of each group; None for an optimizer without
        self._options = values
        self.trial = _try(self._make, config)
        self.update_bytes = 4.0 * (3 + 2 * len(self.trial.matrix))  # weight and state read and written, gradient read

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        decay = {} if self._weight_decay is None else {_WEIGHT_DECAY: self._weight_decay}
        part: Any = self._part
        made: torch.optim.Optimizer = part(groups, lr=self.config.lr, **self._options, **decay)
        return made

    def obstacles(self, sharded: bool) -> Iterator[Problem]:
        kind = self.config.kind
        if self.mode != AUTO and MODES[self.mode].weights != torch.float32:
            reason = f"weights are bf16 with precision.mode={self.mode}, and it does not round its updates to them."
            yield Problem(_PATH, reason, "Use fp32 or mixed, or hlat.optim.OptimizerSpec.", kind, True)
        if sharded and (why := self.trial.depends_on_shards):
            remedy = "Use zero=0 and tensor=1, or one process."
            yield Problem(_PATH, f"parameters are sharded, and {why}", remedy, kind, True)

    def state_dtypes(self, hidden_matrix: bool) -> dict[str, torch.dtype]:
        return dict(self.trial.matrix) if hidden_matrix else {**self.trial.matrix, **self.trial.vector}

    def kernel(self, device: torch.device) -> str:
        return f"{self._part.__module__}.{self._part.__qualname__}"

    def build(
        self, parameters: Sequence[LocalParameter], seed: int = 0, matrices: WholeMatrices | None = None
    ) -> Optimizer:
        groups = scaled_groups(parameters, self.config, weight_decay=self._weight_decay or 0.0)
        return ElementwiseOptimizer(groups, self._make, self.trial, self._weight_decay is not None, self.config.lr)


_elementwise = functools.lru_cache(maxsize=32)(ElementwiseSpec)  # a plan asks for the same one thousands of times


class ElementwiseOptimizer(Optimizer):
    """An optimizer of plain local tensors, as an optimizer of local parameters.

    Its own ``state`` is what is saved; the inner optimizer has the same tensors, and numbers besides them.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[LocalParameter], dict[str, float]]],
        make: Make,
        trial: Trial,
        decays: bool,
        rate: float,
    ) -> None:
        self._parameters = [each for members, _ in groups for each in members]
        self._trial = trial
        self.state_names = tuple(dict.fromkeys([*trial.matrix, *trial.vector]))
        # Plain tensors that share the memory of the weights: the class need not know of shards.
        self._plain = [torch.nn.Parameter(each.tensor, requires_grad=False) for each in self._parameters]
        plain = iter(self._plain)
        parts: list[dict[str, Any]] = []
        for members, options in groups:
            decay = {_WEIGHT_DECAY: options[_WEIGHT_DECAY]} if decays else {}
            parts.append({"params": [next(plain) for _ in members], **decay})
        self._new_inner: Callable[[], torch.optim.Optimizer] = lambda: make(
            [{**part, "params": list(part["params"])} for part in parts]
        )
        self._inner = self._new_inner()
        self._steps = 0  # done, counted here too: reading the counters would wait for the device
        self._numbers: dict[str, Number] | None = None  # loaded ones, until the next step
        super().__init__([{"params": [each.parameter for each in members]} for members, _ in groups], {"lr": rate})

    def init_state(self, parameter: torch.Tensor) -> None:
        if state := self.state[parameter]:
            return
        plain = self._plain[next(n for n, each in enumerate(self._parameters) if each.parameter is parameter)]
        state[STEP] = torch.zeros((), dtype=torch.float32, device=counter_device(plain.device))
        for name, dtype in (self._trial.matrix if plain.ndim >= 2 else self._trial.vector).items():
            state[name] = torch.zeros_like(plain, dtype=dtype)

    def set_learning_rate(self, rate: float) -> None:
        super().set_learning_rate(rate)
        for group in self._inner.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._evaluate(closure)
        if not self.state:  # new, or cleared: the run goes back to its start
            self._steps = 0
        self.allocate_state()
        if in_fake_world():  # a class of the user's own may read values, which fake tensors have none of
            return loss
        self._lend_state()
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        self._steps += 1
        torch._foreach_add_([self.state[each.parameter][STEP] for each in self._parameters], 1)
        for each, plain in zip(self._parameters, self._plain, strict=True):
            state, inner = self.state[each.parameter], self._inner.state[plain]
            for name in state.keys() & inner.keys() - {STEP}:
                state[name] = inner[name]
        return loss

    def _lend_state(self) -> None:
        """Give weights, gradients and state to the inner optimizer; before the first step it makes its own state."""
        begins = self._steps == 0
        if begins:  # its state may begin with other values than zeros
            self._inner = self._new_inner()
            self.set_learning_rate(self.param_groups[0]["lr"])
        for each, plain in zip(self._parameters, self._plain, strict=True):
            plain.data, plain.grad = each.tensor, each.gradient
            if not begins:
                _load_state(self._inner, plain, self.state[each.parameter], self._trial, self._numbers)
        self._numbers = None

    def numbers(self) -> dict[str, torch.Tensor]:
        return super().numbers() | {
            f"number.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self._present().items()
        }

    def _present(self) -> dict[str, Number]:
        if self._numbers is not None:
            return self._numbers
        inner = self._inner.state.get(self._plain[0], {}) if self._plain else {}
        return {name: _plain_number(inner.get(name, first)) for name, first in self._trial.numbers.items()}

    def load_numbers(self, numbers: Mapping[str, torch.Tensor]) -> None:
        super().load_numbers(numbers)
        self._steps = int(numbers[STEP].item())
        self._inner.state.clear()
        self._numbers = {name: numbers[f"number.{name}"].item() for name in self._trial.numbers}


def _load_state(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    trial: Trial,
    numbers: Mapping[str, Number] | None,
) -> None:
    """Give an optimizer the saved state of a parameter; ``numbers`` are loaded ones, None keeps those that it has."""
    state = optimizer.state[parameter]
    for name in trial.matrix if parameter.ndim >= 2 else trial.vector:
        state[name] = tensors[name]
    if numbers is None:
        return
    group = next(g for g in optimizer.param_groups if any(one is parameter for one in g["params"]))
    # As in torch's optimizers: counters are on the host unless kernels read them.
    device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    for name, first in trial.numbers.items():
        if isinstance(first, torch.Tensor):
            state[name] = torch.full_like(first, numbers[name], device=device)
        else:
            state[name] = type(first)(numbers[name])


def _plain_number(value: Any) -> Number:
    number: Number = value.item() if isinstance(value, torch.Tensor) else value
    return number


_RATES = (0.5, 1.0, 0.7, 0.3)  # of the peak, in the steps of a trial
_ROWS, _COLUMNS = 4, 6
_Parts = list[torch.Tensor]
_CUTS: tuple[Callable[[torch.Tensor], Sequence[torch.Tensor]], ...] = (
    lambda tensor: tensor.split(2),  # rows, as FSDP2 and tensor parallelism shard them
    lambda tensor: tensor.split(3, dim=-1),  # columns, as tensor parallelism shards them
)


def _try(make: Make, config: OwnOptimizerConfig) -> Trial:
    """Take small steps; RecipeError if they fail, or if their state cannot be saved."""
    try:
        with host_values(), torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _describe(make, config)
    except RecipeError:
        raise
    # Code of the user's own may raise anything.
    except Exception as error:
        raise _refused(
            config, f"a step of it on a matrix and a vector fails: {type(error).__name__}: {error}"
        ) from error


def _describe(make: Make, config: OwnOptimizerConfig) -> Trial:
    matrix, vector = _weights()
    optimizer = make([{"params": [matrix, vector]}])
    _step(optimizer, [[matrix], [vector]], 0, config.lr)
    states = [optimizer.state.get(each, {}) for each in (matrix, vector)]
    kinds = [_sorted_state(config, each, state) for each, state in zip((matrix, vector), states, strict=True)]
    numbers = [
        {name: copy.deepcopy(value) for name, value in state.items() if name not in kind and value is not None}
        for state, kind in zip(states, kinds, strict=True)
    ]
    if [{name: _plain_number(value) for name, value in each.items()} for each in numbers[1:]] != [
        {name: _plain_number(value) for name, value in each.items()} for each in numbers[:-1]
    ]:
        raise _refused(config, f"numbers of its state ({', '.join(numbers[0])}) differ from parameter to parameter")
    trial = Trial(kinds[0], kinds[1], numbers[0])
    _check_rate(make, config)
    _check_resume(make, config, trial)
    return Trial(kinds[0], kinds[1], numbers[0], _shard_dependence(make, config))


def _sorted_state(config: OwnOptimizerConfig, parameter: torch.Tensor, state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return dtypes of the state tensors of a parameter; refuse other state than these and numbers."""
    found = {}
    for name, value in state.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            if name == STEP:
                raise _refused(config, f"its state {STEP} is a tensor of the parameter's shape: rename it")
            found[str(name)] = value.dtype
        elif not (isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            what = f"its state {name} is a {type(value).__name__}{shape}, for a parameter of {tuple(parameter.shape)}"
            raise _refused(config, f"{what}: checkpoints have tensors of the parameter's shape, and numbers")
    return found


def _check_rate(make: Make, config: OwnOptimizerConfig) -> None:
    if torch.equal(_after(make, config, None), _after(make, config, None, scale=0.5)):
        raise _refused(config, "it does not read the learning rate of its param_groups, so no schedule reaches it")


def _check_resume(make: Make, config: OwnOptimizerConfig, trial: Trial) -> None:
    straight, weights = make([{"params": (first := _weights())}]), first
    for number in range(2):
        _step(straight, [[each] for each in weights], number, config.lr)
    copies = [each.detach().clone().requires_grad_() for each in weights]
    resumed = make([{"params": copies}])
    for each, new in zip(weights, copies, strict=True):
        state = copy.deepcopy(straight.state[each])
        _load_state(resumed, new, state, trial, {name: _plain_number(state[name]) for name in trial.numbers})
    random = torch.random.get_rng_state()  # which a checkpoint has
    for number in range(2, 4):
        _step(straight, [[each] for each in weights], number, config.lr)
    torch.random.set_rng_state(random)
    for number in range(2, 4):
        _step(resumed, [[each] for each in copies], number, config.lr)
    if not all(torch.equal(one, other) for one, other in zip(weights, copies, strict=True)):
        raise _refused(config, "a resumed run would differ: it keeps state elsewhere than in state[parameter]")


def _shard_dependence(make: Make, config: OwnOptimizerConfig) -> str:
    whole = _after(make, config, None)
    scale = (whole - torch.cat([each.flatten() for each in _weights()]).detach()).abs().max()
    for cut in _CUTS:
        if (_after(make, config, cut) - whole).abs().max() > _TOLERANCE * scale:
            return "steps on the halves of a tensor differ from those on the whole: its updates are not element-wise."
    return ""


def _after(
    make: Make,
    config: OwnOptimizerConfig,
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return the weights after the steps of a trial, flat: of whole tensors, or of the parts of each."""
    weights = _weights()
    parts = [[each] if cut is None else [one.detach().clone() for one in cut(each)] for each in weights]
    optimizer = make([{"params": [one for each in parts for one in each]}])
    for number in range(len(_RATES)):
        _step(optimizer, parts, number, config.lr * scale, cut)
    joined = []
    for each, own in zip(weights, parts, strict=True):
        whole = torch.empty_like(each)
        for place, part in zip([whole] if cut is None else cut(whole), own, strict=True):
            place.copy_(part.detach())
        joined.append(whole.flatten())
    return torch.cat(joined).detach()


def _step(
    optimizer: torch.optim.Optimizer,
    parts: Sequence[_Parts],
    number: int,
    rate: float,
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None,
) -> None:
    for gradient, own in zip(_gradients(number), parts, strict=True):
        for one, part in zip(own, [gradient] if cut is None else cut(gradient), strict=True):
            one.grad = part.clone()
    for group in optimizer.param_groups:
        group["lr"] = rate * _RATES[number]
    optimizer.step()


def _weights() -> _Parts:
    generator = torch.Generator().manual_seed(1)
    shapes = ((_ROWS, _COLUMNS), (_COLUMNS,))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _gradients(number: int) -> _Parts:
    # Of different sizes in each row and column, so that norms of parts differ from those of the whole.
    generator = torch.Generator().manual_seed(100 + number)
    rows, columns = torch.arange(1.0, _ROWS + 1).unsqueeze(1), torch.arange(1.0, _COLUMNS + 1)
    return [
        torch.randn(_ROWS, _COLUMNS, generator=generator) * rows * columns,
        torch.randn(_COLUMNS, generator=generator) * columns,
    ]


def _refused(config: OwnOptimizerConfig, reason: str) -> RecipeError:
    return RecipeError([Problem(_PATH, f"{reason}.", _REMEDY, config.kind, True)])
