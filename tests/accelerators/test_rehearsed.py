"""A rehearsal of a Neuron device says what a run on the stand-in then does, and how much memory it takes.

The stand-in has no attention kernel of its own: torch computes it there from products and softmax, which keeps the
scores. Its rehearsal is told so; the kernel of the real device is not verified.

Memory: the stand-in counts every allocation since the start, of two steps. Not in the rehearsal are operators that the
stand-in leaves to the CPU with other temporaries, and what the first step alone allocates: 5 % of these small models.
"""

from typing import Any

import pytest

from hlat.config.load import parse_recipe
from hlat.hardware import load_catalog
from hlat.rehearsal import Rehearsal, parse_device, rehearse
from hlat.runtime.backend.table import backend_of
from tests.support.neuron.rehearsed import decide_and_train
from tests.support.neuron.running import on_neuron
from tests.support.rehearsal.small_recipes import SMALL

ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, fp32": (1, {"precision": {"mode": "fp32"}}),
    "two processes, ZeRO 3, mixed": (2, {"precision": {"mode": "mixed"}, "parallel": {"zero": 3}}),
    "tensor and sequence, bf16-sr, selective": (
        2,
        {
            "precision": {"mode": "bf16-sr"},
            "parallel": {"tensor": 2},
            "memory": {"activation_checkpointing": "selective"},
        },
    ),
    "context, fp32": (2, {"precision": {"mode": "fp32"}, "parallel": {"context": 2}}),
}


def content_of(sections: dict[str, Any]) -> dict[str, Any]:
    """A model whose activations are larger than anything that the comparison leaves out."""
    model = {**SMALL["model"], "hidden_size": 64, "intermediate_size": 192, "max_sequence_length": 128}
    data = {**SMALL["data"], "sequence_length": 128}
    return {**SMALL, "model": model, "data": data, "batch": {"global_batch": 8, "micro_batch": 2}, **sections}


def rehearsed(world: int, content: dict[str, Any]) -> Rehearsal:
    """The rehearsal of rank 0."""
    return rehearse(parse_recipe(content, world=world), world, [0], device=parse_device("neuron", None, load_catalog()))


@pytest.mark.parametrize("name", ROWS)
def test_a_run_does_what_its_rehearsal_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, sections = ROWS[name]
    content = content_of(sections)
    monkeypatch.setattr(type(backend_of("neuron")), "_expected_attention", lambda *heads: "math")
    said = rehearsed(world, content)
    told = {decision.name: decision.choice for decision in said.decisions}
    done = on_neuron(decide_and_train, content, world=world)[0]
    assert told["process group"] == done["process group"]
    assert told["torch's deterministic mode"] == ("on" if done["torch's deterministic mode"] else "off")
    assert told["blocks"].startswith("compiled") == done["compiled"]
    if done["weights"] == "bfloat16":
        assert told["optimizer"].endswith("kernel compiled") and done["graphs"] > 0
        assert told["bias corrections of bf16 AdamW"].startswith("on the host") and done["counters"] == "cpu"
    else:
        assert told["optimizer"] == "torch's AdamW, foreach" and done["optimizer"] == (False, True)
    assert done["peak"] == pytest.approx(said.ranks[0].peak_bytes, rel=0.05)
