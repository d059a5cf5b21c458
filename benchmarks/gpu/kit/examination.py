"""Verdict of ``hlat doctor`` on this machine, and a plan by rates that were measured here.

doctor --> findings;  measured products, copies --> catalog --> plan of the r8 case, beside what was measured
"""

import json

import hlat
from hlat.hardware import measure_machine
from hlat.launch.preflight.request import PreflightOptions
from kit.child import Context
from kit.report import read_json
from kit.shapes import case_recipe
from kit.training import device_of, folder

_PATIENCE = 20.0


def run(context: Context) -> None:
    """Examine, then plan."""
    with context.part("doctor"):
        options = PreflightOptions(nproc=1, run_dir=folder(context.work, "doctor"), patience=_PATIENCE)
        report = hlat.doctor(options=options).to_dict()
        context.found({"doctor": report})
        # A small machine may be worth a finding; on a GPU that everybody rents there should be none.
        findings = [str(each)[:300] for each in report.get("findings") or []]
        context.check("doctor finds nothing wrong", not findings or context.device == "cpu", findings)
    with context.part("plan"):
        machine = measure_machine(device_of(context.device), budget_seconds=0.05 if context.tiny else 1.0)
        catalog, asked = context.work / "measured.yaml", context.work / "r8.yaml"
        catalog.write_text(json.dumps(machine.catalog("measured")))  # JSON is YAML too
        recipe = case_recipe("r8", context.tiny, "auto", context.work)
        asked.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
        layout = "tp=1,pp=1,zero=0,micro=1"
        chosen = hlat.plan(asked, "measured:1", per="chip", hardware=catalog, layout=layout).to_dict()["chosen"]
        measured = read_json(context.work / "results" / "r8.json").get("numbers") or {}
        context.found(
            {
                "measured machine": {"flops": machine.flops, "memory_rate": machine.memory_rate},
                "planned_by_measured_rates": chosen,
                "r8_step_seconds": measured.get("step_seconds"),
            }
        )
