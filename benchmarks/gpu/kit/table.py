"""Steps of the kit, the most valuable first: a step that comes late falls when the time is short.

Step --first_contact.py--> process with a limit --> MODULE.FUNCTION(context) --> numbers, checks
cases of a step --background process--> prediction by hlat's rehearsal and planner, written before the step runs
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One measurement, in a process of its own.

    Attributes:
        name: name for ``--only`` and in results.json.
        module: module with the function.
        limit: seconds after which the process is killed.
        title: question that the step answers.
        arguments: arguments of the function, after the context.
        cases: cases of ``kit.shapes.CASES`` that are predicted before it runs.
        expected: further values that are expected, by the name of the number.
        needs_warm_cache: True if it waits, for a while, until the compilers' cache is filled.
        alone: True if background processes stand still meanwhile: their memory on the GPU must not change.
    """

    name: str
    module: str
    limit: float
    title: str
    function: str = "run"
    arguments: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    expected: dict[str, object] = field(default_factory=dict)
    needs_warm_cache: bool = False
    alone: bool = False


def _speed(name: str, limit: float, title: str) -> Step:
    return Step(name, "kit.speed", limit, title, arguments=(name,), cases=(name,), needs_warm_cache=True)


CEILINGS = {
    # name by nvidia-smi -> rates of one such GPU as others have measured it: copies count bytes read and written
    "NVIDIA H100 80GB HBM3": {"copy_gb_per_second": 3000, "bf16_tflops": 798},
    "NVIDIA H200": {"copy_gb_per_second": 4300, "bf16_tflops": 788},
}

# Expectations that no formula of hlat gives: bits that must be equal, memory that must be free again.
STEPS = (
    Step("machine", "kit.machine", 60, "what is there, and its ceilings"),
    Step(
        "parity",
        "kit.parity",
        70,
        "does the GPU compute what a CPU computes, and twice the same bits",
        expected={"waits_per_step": 1},
    ),
    Step("kernels", "kit.kernels", 90, "are single kernels right, and which attention kernel runs"),
    Step(
        "recovery",
        "kit.recovery",
        100,
        "is a resume bitwise after SIGKILL during a save, and is the killed rank's memory free",
        expected={"retained_mib": 0},
        alone=True,
    ),
    _speed("r8", 75, "8B-shape blocks x 8, 8k tokens, deterministic"),
    _speed("r8-fast", 60, "the same with run.deterministic=false, the default there"),
    _speed("r8-eager", 50, "the same without the compiler"),
    _speed("r8-documents", 60, "the same with attention within documents (flex attention)"),
    _speed("r8-bf16-sr", 60, "the same in bf16-sr"),
    _speed("1b", 60, "1B model, 128k words: share of head and loss"),
    _speed("1b-fast", 45, "the same with run.deterministic=false, the default there"),
    Step("fsdp", "kit.sharded", 50, "is FSDP2 on one rank the plain model, and what does it cost"),
    _speed("r8-fp8", 75, "8B-shape blocks x 8 in fp8"),
    Step("generation", "kit.generation", 60, "tokens per second of generation and scoring", cases=("generation",)),
    Step("doctor", "kit.examination", 60, "verdict of hlat doctor, and a plan by measured rates"),
    Step(
        "compiled",
        "kit.compiled",
        110,
        "are compiled gradients right: documents, window, recomputed; ncu of the loss",
    ),
)

CASES = tuple(dict.fromkeys(case for step in STEPS for case in step.cases))
"""Cases that are predicted, in the order in which they are needed."""

WARM = (("r8", "r8-documents"), ("r8-fast", "r8-fp8", "r8-bf16-sr"), ("1b", "1b-fast"))
"""Cases whose graphs each background process compiles into the cache, the first ones first."""


def chosen(only: list[str]) -> list[Step]:
    """Return the steps of these names, all if there is none; a name of the beginning means all that begin with it.

    Raises:
        SystemExit: there is no such step.
    """
    unknown = [name for name in only if not any(step.name.startswith(name) for step in STEPS)]
    if unknown:
        raise SystemExit(f"no step {', '.join(unknown)}; there are {', '.join(step.name for step in STEPS)}")
    exact = {step.name for step in STEPS}
    return [
        step
        for step in STEPS
        if not only or any(step.name == name or (name not in exact and step.name.startswith(name)) for name in only)
    ]
