"""A layout in one word, as ``--layout`` takes it."""

from hlat.planner.problem.layouts import Candidate


def layout_text(layout: Candidate) -> str:
    """Write a layout as ``parse_layout`` reads it, without its defaults."""
    words = [f"tp={layout.tensor}"] * (layout.tensor > 1) + [f"pp={layout.pipeline}"] * (layout.pipeline > 1)
    words += [f"cp={layout.context}"] * (layout.context > 1) + [f"vpp={layout.virtual}"] * (layout.virtual > 1)
    words += [f"zero={layout.zero}"] * (layout.zero != 1) + [f"rep={layout.replicas}"] * (layout.replicas > 1)
    words += [f"mbs={layout.micro_batch}"] * (layout.micro_batch > 1)
    words += [f"recompute={layout.recompute}"] * (layout.recompute != "none")
    words += ["gather=never"] * (layout.parallel.gather_again == "never")
    implied = "interleaved-1f1b" if layout.virtual > 1 else "1f1b"
    words += [f"schedule={layout.schedule}"] * (layout.pipeline > 1 and layout.schedule != implied)
    return ",".join(words) or "tp=1"
