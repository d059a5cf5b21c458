"""Report: what happened in runs, as one HTML page, as a page that follows a run, and as a list of runs.

    run folders --read_run--> RunRecord --write_report--> one file without references to others
                                        --ReportServer--> the same page on this machine's loopback address
    folder      --list_runs-> a line per run: state, step, loss, speed

Runs may be in progress or killed. Nothing in their folders is changed, except that a report is written.
"""

from hlat.reporting.plan_comparison import Machines
from hlat.reporting.report_page import report_page, write_report
from hlat.reporting.run_list import RunSummary, list_runs
from hlat.reporting.server import ReportServer

__all__ = [
    "Machines",
    "ReportServer",
    "RunSummary",
    "list_runs",
    "report_page",
    "write_report",
]
