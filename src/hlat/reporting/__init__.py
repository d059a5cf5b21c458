"""Report: what happened in runs, as one HTML page, as a page that follows a run, as text, and as a list of runs.

    run folders --read_run--> RunRecord --write_report--> one file without references to others
                                        --ReportServer--> the same page on this machine's loopback address
                                        --summary_markdown--> a paragraph for a pull request or a chat
    run folder  --read_overview-> RunOverview: recipe, attempts, curve, last numbers, checkpoints; compare_runs: several
    folder      --list_runs-> a line per run: state, step, loss, speed

Runs may be in progress or killed. Nothing in their folders is changed, except that a report is written. Lists and
overviews start fast: modules that need torch or numpy are imported when a name of theirs is first used.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.reporting.overview import *
    from hlat.reporting.planned_and_actual import *
    from hlat.reporting.report import *
    from hlat.reporting.run_record import *
    from hlat.reporting.run_status import *
    from hlat.reporting.summary import *

__getattr__ = lazily(
    __name__,
    {
        "overview": (
            "LossesAt RunComparison RunOverview compare_runs family_lines flat_settings read_overview shown_settings "
            "sparkline"
        ),
        "planned_and_actual": "Machines",
        "report": "ReportServer report_page write_report",
        "run_record": "RunRecord active_seconds read_run",
        "run_status": "RunSummary is_run list_runs",
        "summary": "summary_markdown",
    },
)
