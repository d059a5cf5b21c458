"""The sections of a recipe about the training itself: run, batch, optimizer, schedule, evaluation, precision.

    optimizer: {kind: NAME, ...}  --> the section class of NAME; a section without kind is adamw's

One sentence per field: this file is the manual. ``hlat.optim.table`` has the implementation of each kind of optimizer;
its section class is here, at the end, and in the union ``AnyOptimizerConfig``.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from hlat.config.sections.base import Choice, ComponentSection, Count, Positive, Section, Share, Whole, fixed
from hlat.runtime.backend.table import BACKENDS

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
ComponentName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]

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


class OptimizerConfig(Section):
    """Fields of every optimizer: each updates embeddings, head, norms and biases by AdamW; and gradient clipping."""

    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings."""
    decay_norms: bool = False
    """Decay norm weights and biases too, as HLAT did."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm; null for no clipping."""
    z_loss: float = Field(0.0, ge=0)
    """Factor of log(Z)^2 added to each token's loss, Z the sum of its exponentials: 1e-5 in OLMo 2; 0 for none."""


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    kind: Literal["cosine", "cosine-clipped", "constant", "wsd"] = "cosine"
    """cosine reaches the floor at the horizon; cosine-clipped is HLAT's max(floor, cosine); wsd decays at the end."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from zero to the peak."""
    min_ratio: Share = Field(0.1, ge=0, le=1)
    """The floor, as a share of the peak learning rate."""
    horizon_steps: Positive | None = None
    """Step at which the schedule ends; null means the last step of the run."""
    decay_fraction: Share = Field(0.2, gt=0, le=1)
    """Share of the horizon that wsd spends decaying, linearly, to the floor."""


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

    steps: Positive | None = None
    """Optimizer steps of the whole run; or give tokens."""
    tokens: Positive | None = None
    """Tokens of the whole run, rounded up to whole steps; or give steps."""
    seed: int = fixed(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the samples."""
    log_every: Positive = 10
    """Steps between two lines of metrics."""
    stop_after: Positive | None = None
    """End cleanly after so many steps of this process, saving a checkpoint, as an interruption would."""
    ema: EmaConfig | None = None
    """Average of the weights, saved in checkpoints for hlat export --weights ema; null for none."""
    components: dict[ComponentName, dict[str, Any]] = {}
    """Components of other packages (entry point group hlat.components), by name, with their options."""


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
    """JSONL files of requests of evaluation tasks, as hlat evaluate --render writes them."""
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


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019) and gradient clipping."""

    kind: Literal["adamw"] = fixed("adamw")
    """Name of the optimizer."""


class MuonConfig(OptimizerConfig):
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


def _kind_of(section: Any) -> Any:
    """Return the kind that a section states; adamw if it states none."""
    return section.get("kind", "adamw") if isinstance(section, dict) else getattr(section, "kind", "adamw")


AnyOptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[MuonConfig, Tag("muon")],
    Discriminator(_kind_of),
]
"""Section of any optimizer."""
