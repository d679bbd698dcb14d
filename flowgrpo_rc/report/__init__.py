"""Is this run healthy? Checks on what a run logged, and one page that shows it.

Needs no torch: metrics are read as plain numbers, so the checks also serve rows that another trainer logged.
"""

from flowgrpo_rc.report.finding import Finding, worst
from flowgrpo_rc.report.health import check_health
from flowgrpo_rc.report.page import build_page, write_report
from flowgrpo_rc.report.run import NotARunError, Run, read_run

__all__ = ["Finding", "NotARunError", "Run", "build_page", "check_health", "read_run", "worst", "write_report"]
