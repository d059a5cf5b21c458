"""The sections of a recipe about the training itself: run, batch, optimizer, schedule, precision, layout, memory, ...

    optimizer: {kind: NAME, ...}  --> the section class of NAME; a section without kind is adamw's
    parallel: degrees x world -> one rank per process; a copy of the model takes tensor x pipeline x context of them

The data-parallel degree is what is left: world / (tensor * pipeline * context). Mesh axes from outermost to innermost
are pipeline, data, context, tensor. No field of the layout is fixed: a run may go on in another one.

One sentence per field: this file is the manual. ``hlat.optim.table`` has the implementation of each kind of optimizer;
its section class is here, and in the union ``AnyOptimizerConfig``.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, model_validator

from hlat.config.own_parts import OPTIMIZERS, SCHEDULES
from hlat.config.sections.base import (
    Choice,
    ComponentSection,
    Count,
    Gibibytes,
    OwnName,
    OwnPart,
    Positive,
    Section,
    Share,
    Whole,
    as_own,
    fixed,
    forks,
)
from hlat.runtime.backend.table import BACKENDS

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

if TYPE_CHECKING:
    Device = str
else:
    Device = Literal[("auto", *BACKENDS)]  # type checkers do not see the keys of a table


class RunConfig(Section):
    """Name, folder and device of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: letters, digits, dot, dash and underscore."""
    dir: str | None = None
    """Folder of everything the run writes; null means runs/<name>. The same folder again resumes the run."""
    ladder: str | None = None
    """Folder of a ladder, whose law forecasts the loss of this run before its first step; null for no forecast."""
    device: Device = "auto"
    """Device type to run on; auto takes the accelerator if torch finds one, else the CPU."""
    compile: Literal["auto", "blocks", "none"] = "auto"
    """Scope of torch.compile: blocks, none, or auto: blocks on GPUs, and in long bf16 runs on CPUs with bf16
    instructions."""
    compile_cache: str | None = None
    """Folder of compiled code on each machine, which hlat compile fills; null means a folder of this user, unless
    variables of the compilers name others."""
    deterministic: Choice = "auto"
    """Use deterministic kernels only, which bitwise resume requires. false allows other GPU kernels, which may be
    faster, and a resume with other kernels than before the checkpoint; a resumed run is then close to one that was not
    interrupted, but not bitwise equal. auto is true, except where it takes a slower kernel of attention: on most GPUs;
    a resumed run keeps what it began with."""

    @property
    def determinism(self) -> bool | None:
        """``deterministic``, None for auto."""
        return self.deterministic if isinstance(self.deterministic, bool) else None


class RampStage(Section):
    """A part of the run, at its beginning, with a smaller global batch."""

    tokens: Positive
    """Tokens of this stage, rounded up to whole steps."""
    global_batch: Positive
    """Sequences per optimizer step in this stage."""


class BatchConfig(Section):
    """Sequences per optimizer step and per forward pass."""

    global_batch: Whole = fixed(32, gt=0)
    """Sequences per optimizer step, over all devices and accumulation steps."""
    ramp: tuple[RampStage, ...] = fixed(())
    """Stages with smaller batches at the beginning of the run, in order; after the last one, global_batch holds."""
    micro_batch: Positive = 8
    """Sequences per forward and backward pass on one device."""


class Growth(NamedTuple):
    """Sizes of a model, each divided by that of the model on which its rates were tuned."""

    width: float = 1.0
    depth: float = 1.0
    head: float = 1.0  # of the width of a head


class OptimizerConfig(Section):
    """Fields of every optimizer, and gradient clipping."""

    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    decay_norms: bool = False
    """Decay norm weights and biases too, as HLAT did."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm; null for no clipping."""
    z_loss: float = Field(0.0, ge=0)
    """Factor of log(Z)^2 added to each token's loss, Z the sum of its exponentials: 1e-5 in OLMo 2; 0 for none."""

    def growth(self, hidden_size: int, layers: int, head_dim: int) -> Growth:
        """Return how many times as large a model is as the one whose rates the section gives."""
        return Growth()

    def rate_factor(self, hidden_matrix: bool, width: float = 1.0) -> float:
        """Return the factor of ``lr`` for hidden matrices of a model that much wider, or for all other parameters."""
        return 1.0


class AdamWFields(OptimizerConfig):
    """Fields of AdamW, which in every optimizer of hlat updates embeddings, head, norms and biases."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings."""
    transfer: Literal["none", "mup", "completep"] = fixed("none")
    """Rule by which lr, weight_decay, eps and model.init_std, tuned on a smaller model of the same form, become those
    of each matrix: mup for other widths, completep for other widths and depths; hlat check -v prints them."""
    base_hidden_size: int | None = fixed(None, gt=0)
    """hidden_size of the model on which they were tuned; its other widths are smaller in proportion."""
    base_layers: int | None = fixed(None, gt=0)
    """Layers of the model on which they were tuned, for completep."""
    base_head_dim: int | None = fixed(None, gt=0)
    """Width of a head of that model; null means as in this one, so that more width is more heads."""

    def growth(self, hidden_size: int, layers: int, head_dim: int) -> Growth:
        sizes, bases = (hidden_size, layers, head_dim), (self.base_hidden_size, self.base_layers, self.base_head_dim)
        return Growth(*(1.0 if base is None else size / base for size, base in zip(sizes, bases, strict=True)))

    def rate_factor(self, hidden_matrix: bool, width: float = 1.0) -> float:
        return 1.0 / width if hidden_matrix else 1.0


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    kind: Literal["cosine", "cosine-clipped", "constant", "wsd", "linear", "1-sqrt"] = "cosine"
    """cosine, linear and 1-sqrt reach the floor at the horizon; cosine-clipped is HLAT's max(floor, cosine); wsd decays
    at the end."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from zero to the peak."""
    min_ratio: Share = Field(0.1, ge=0, le=1)
    """The floor, as a share of the peak learning rate."""
    horizon_steps: Positive | None = None
    """Step at which the schedule ends; null means the last step of the run."""
    decay_fraction: Share = Field(0.2, gt=0, le=1)
    """Share of the horizon that wsd spends decaying, linearly, to the floor."""

    @model_validator(mode="wrap")
    @classmethod
    def _may_be_own(cls, values: Any, validate: Any) -> Any:
        return as_own(cls, OwnScheduleConfig, SCHEDULES, "kind", values) or validate(values)


class OwnScheduleConfig(ScheduleConfig, OwnPart):
    """A schedule of the user's own, with its options: package.module:function."""

    kind: str  # type: ignore[assignment]
    """Name of the function."""


class EmaConfig(ComponentSection):
    """Exponential moving average of the weights, in fp32; 4 bytes per parameter on the rank that stores it."""

    bytes_per_parameter: ClassVar[int] = 4

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Weight of the old average in each update; 1 / (1 - decay) updates are averaged, roughly."""
    every_steps: Positive = 1
    """Steps between two updates."""
    start_step: Count = 0
    """Step with whose weights the average begins; before, it equals the weights."""


class TrainingConfig(Section):
    """Length of the run, seed, logging, and components that take part in each step."""

    steps: Positive | None = forks(None)
    """Optimizer steps of the whole run; or give tokens."""
    tokens: Positive | None = forks(None)
    """Tokens of the whole run, rounded up to whole steps; or give steps."""
    seed: int = fixed(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the samples."""
    log_every: Positive = 10
    """Steps between two lines of metrics."""
    stop_after: Positive | None = None
    """End cleanly after so many steps of this process, saving a checkpoint, as an interruption would."""
    ema: EmaConfig | None = None
    """Average of the weights, saved in checkpoints for hlat export --weights ema; null for none."""
    loss_terms: dict[OwnName, dict[str, Any]] = forks({})
    """Terms of your own added to the loss that is minimized, by name (package.module:function, or an entry point of
    hlat.losses), with options; the reported loss remains the cross-entropy."""
    components: dict[OwnName, dict[str, Any]] = {}
    """Components of your own, by name (package.module:Name, or an entry point of hlat.components), with options."""


class StageConfig(Section):
    """A part of the run, in order; what it does not name goes on as in the stage before."""

    name: SetName = fixed()
    """Name of the stage: letters, digits, dot, dash and underscore."""
    steps: Positive | None = None
    """Optimizer steps of the stage; or give tokens."""
    tokens: Positive | None = None
    """Tokens of the stage, rounded up to whole steps; or give steps."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = fixed({})
    """Shares of data.sources by name, instead of their weights; sources that are not named have none."""
    restart: bool | tuple[str, ...] = fixed(False)
    """Begin all sources, or those named, anew. Otherwise a source goes on where earlier stages left it: no text of it
    is read twice."""
    fresh: Literal["optimizer"] | None = fixed(None)
    """optimizer begins with an empty state of the optimizer; null keeps it."""
    model: dict[str, Any] = fixed({})
    """Fields of the model that change: rope, local_rope."""
    data: dict[str, Any] = fixed({})
    """Fields of data that change: path, sources, sequence_length, packing, isolate, shuffle, prepared_dir."""
    batch: dict[str, Any] = {}
    """Fields of batch that change: global_batch, micro_batch."""
    optimizer: dict[str, Any] = {}
    """Fields of the optimizer that change; its kind stays."""
    schedule: dict[str, Any] = {}
    """Fields of the schedule; naming any begins a new one here, from the rate that holds, or towards optimizer.lr if
    the stage gives that."""
    training: dict[str, Any] = {}
    """Fields of training that change: ema, log_every."""
    evaluation: dict[str, Any] = {}
    """Fields of the evaluation that change."""
    parallel: dict[str, Any] = {}
    """Fields of the layout that change."""
    memory: dict[str, Any] = {}
    """Fields of memory that change."""


class EvaluationConfig(Section):
    """Evaluation during training: loss on fixed sets of sequences, and scores of tasks."""

    every_steps: Positive | None = 500
    """Steps between two evaluations; null evaluates only at the end, or as every_tokens says."""
    every_tokens: Positive | None = None
    """Training tokens between two evaluations; null for none but those of every_steps."""
    sequences: Positive | None = 256
    """Sequences of the validation split, and of each set, that are used, always the same; null means all of it."""
    sets: dict[SetName, str] = {}
    """Further validation sets, by name: a file, folder, glob or URL as in data.path."""
    tasks: tuple[str, ...] = ()
    """JSONL files of requests of evaluation tasks, as hlat evaluate --render writes them; or tasks of your own
    (package.module:function, or an entry point of hlat.tasks)."""
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that the model continues at each evaluation, each token the most likely one; hlat report shows them."""
    sample_tokens: Positive = 48
    """Tokens by which a prompt is continued at most."""


class PrecisionConfig(Section):
    """Dtypes of weights, products and optimizer state."""

    mode: Literal["auto", "fp32", "mixed", "bf16-sr", "bf16", "bf16-kahan", "fp8"] = fixed("auto", formerly="fp32")
    """auto (mixed where every device has fast bf16, else fp32; a resumed run keeps what it began with); fp32; mixed
    (bf16 products over fp32 weights and optimizer); bf16-sr (everything bf16, updates rounded stochastically); bf16
    (rounded to nearest: known to stall); bf16-kahan (rounding errors are kept and added later); fp8."""
    rounding: Literal["software", "hardware"] = "software"
    """Rounding of bf16-sr: software rounds updates, alike in every layout and after a resume; hardware is that of
    Trainium, which rounds every conversion to bf16, and needs run.deterministic=false."""

    @property
    def in_hardware(self) -> bool:
        """True if the device rounds stochastically, instead of the optimizer."""
        return self.rounding == "hardware"


class AdamWConfig(AdamWFields):
    """AdamW (Loshchilov and Hutter 2019) and gradient clipping."""

    kind: Literal["adamw"] = fixed("adamw")
    """Name of the optimizer."""


class MuonConfig(AdamWFields):
    """Muon (Jordan et al. 2024; Liu et al. 2025) for the matrices of attention and feed-forward layers."""

    kind: Literal["muon"] = fixed(formerly="adamw")
    """Name of the optimizer."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Use Nesterov's momentum, which looks one step ahead."""
    ns_steps: int = Field(5, ge=1, le=20)
    """Newton-Schulz iterations of an update; fewer than 5 leave many singular values far from 1."""
    adamw_lr: float | None = Field(None, gt=0)
    """Peak learning rate of AdamW for embeddings, head, norms and biases; null for lr, which suits both."""

    def rate_factor(self, hidden_matrix: bool, width: float = 1.0) -> float:
        # Updates of elements of one size, as Moonlight's, have a spectral norm that grows as the root of the width.
        if hidden_matrix:
            return 1.0 / math.sqrt(width)
        return 1.0 if self.adamw_lr is None else self.adamw_lr / self.lr


class OwnOptimizerConfig(OptimizerConfig, OwnPart):
    """An optimizer of the user's own or of torch.optim, with its options: package.module:Name."""

    kind: str = fixed(formerly="adamw")
    """Name of the optimizer."""


OWN = "own"
"""Tag of the section of any part of the user's own in a union."""


def _kind_of(section: Any) -> Any:
    """Return the tag of the kind that a section states; adamw if it states none."""
    if not isinstance(section, dict):
        return OWN if isinstance(section, OwnPart) else getattr(section, "kind", "adamw")
    kind = section.get("kind", "adamw")
    return OWN if kind not in ("adamw", "muon") and OPTIMIZERS.has(kind) else kind


AnyOptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[MuonConfig, Tag("muon")] | Annotated[OwnOptimizerConfig, Tag(OWN)],
    Discriminator(_kind_of),
]
"""Section of any optimizer."""


Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
ZERO_BUBBLE: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv")
INTERLEAVED: tuple[Schedule, ...] = ("interleaved-1f1b", "interleaved-zero-bubble")


def compile_obstacle(pipeline: int, schedule: Schedule) -> str:
    """Return the reason why the schedule of a layout keeps blocks from being compiled; empty if they can be."""
    return "takes the backward pass of a block apart" if pipeline > 1 and schedule in ZERO_BUBBLE else ""


def default_virtual_stages(schedule: Schedule) -> int:
    """Stages per pipeline rank if the recipe gives none: the fewest that the schedule works with."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


def resolved_virtual_stages(pipeline: int, schedule: Schedule, virtual_stages: int | None) -> int:
    """Stages per pipeline rank. Without a pipeline there is no schedule, and one stage unless the recipe gives more."""
    if virtual_stages is not None:
        return virtual_stages
    return default_virtual_stages(schedule) if pipeline > 1 else 1


class ParallelConfig(Section):
    """Degrees of parallelism. The data-parallel degree is the world size divided by their product."""

    tensor: Positive = 1
    """Tensor-parallel degree: ranks that share the heads and the inner columns of every layer."""
    sequence: bool = True
    """Sequence parallelism: shard activations between blocks over the tensor group; no effect at tensor 1."""
    gather_again: Literal["auto", "always", "never"] = "auto"
    """With sequence parallelism, gather the inputs of attention and feed-forward again in backward instead of keeping
    them. never keeps them; auto keeps them with zero-bubble schedules, and within the budget of memory.budget_gib."""
    pipeline: Positive = 1
    """Pipeline-parallel degree: ranks that the layers are cut over."""
    virtual_stages: Positive | None = None
    """Stages per pipeline rank; null means 1 for gpipe and 1f1b, 2 for the interleaved schedules and zbv."""
    schedule: Schedule = "1f1b"
    """Order of forward and backward passes in a pipeline; no effect at pipeline 1."""
    split: tuple[Positive, ...] | None = None
    """Layers of each stage, in order, as in [3, 2]; null: balanced, by the time of
    the slowest rank first, then by the memory of the fullest."""
    context: Positive = 1
    """Context-parallel degree: ranks that each sequence is cut over, in 2 * context chunks, zig-zag."""
    zero: Literal[0, 1, 2, 3] = 1
    """Sharded over data- and context-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    replicas: Positive = 1
    """Copies of the sharded state: sharded within each, replicated across them (hybrid sharding)."""

    @property
    def stages_per_rank(self) -> int:
        return resolved_virtual_stages(self.pipeline, self.schedule, self.virtual_stages)

    @property
    def shards_sequences(self) -> bool:
        """True if activations between blocks are sharded over a tensor group."""
        return self.sequence and self.tensor > 1

    @property
    def gathers_again(self) -> bool:
        # A split backward pass would keep what its first half has gathered until its second half.
        split = self.pipeline > 1 and self.schedule in ZERO_BUBBLE
        return self.shards_sequences and self.gather_again != "never" and not split

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def model_ranks(self) -> int:
        """Processes that work on the same sequences: those of one data-parallel rank."""
        return self.tensor * self.pipeline * self.context

    def describe(self, data: int | None = None) -> str:
        """Return the layout in words; ``data`` is the data-parallel degree, None leaves it open."""
        processes = f"N x {self.model_ranks}" if data is None else f"{data * self.model_ranks}"
        plural = "" if processes == "1" else "es"
        axes = f"pipeline {self.pipeline} x data {data or 'N'} x context {self.context} x tensor {self.tensor}"
        shards = None if data is None else data // self.replicas * self.context
        copies = f" in {self.replicas} replicas" if self.replicas > 1 else ""
        zero = "" if shards == 1 else f", ZeRO {self.zero}{copies}"  # with one shard there is nothing to share out
        return f"{processes} process{plural} = {axes}{zero}"


class MemoryConfig(Section):
    """Activation checkpointing: activations kept for backward, and recomputed."""

    activation_checkpointing: Literal["none", "selective", "full", "budget"] = "none"
    """none keeps all activations; selective recomputes core attention and the SwiGLU product in backward, as HLAT did;
    full keeps only the input of each block; budget recomputes the least that fits into memory.budget_gib."""
    budget_gib: Gibibytes | None = None
    """GiB that one rank may keep for backward, over all micro-batches that it has in flight; only with budget."""
