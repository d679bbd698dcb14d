"""Is this run healthy? Checks on what a run logged, and one page that shows it.

Needs no torch: metrics are read as plain numbers, so the checks also serve rows that another trainer logged.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.report.finding import Finding, worst
    from flowgrpo_rc.report.health import check_health
    from flowgrpo_rc.report.page import build_page, write_report
    from flowgrpo_rc.report.run import NotARunError, Run, read_run

__all__ = ["Finding", "NotARunError", "Run", "build_page", "check_health", "read_run", "worst", "write_report"]

_HOMES = {"Finding": "finding", "worst": "finding", "check_health": "health", "build_page": "page"}
_HOMES |= {"write_report": "page", "NotARunError": "run", "Run": "run", "read_run": "run"}
__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{_HOMES[name]}" for name in __all__})
