"""Is this run healthy? Checks on what a run logged, and one page that shows it.

Needs no torch: metrics are read as plain numbers, so the checks also serve rows that another trainer logged.
"""

from flowgrpo_rc.report.finding import Finding as Finding
from flowgrpo_rc.report.finding import worst as worst
from flowgrpo_rc.report.health import check_health as check_health
from flowgrpo_rc.report.page import build_page as build_page
from flowgrpo_rc.report.page import write_report as write_report
from flowgrpo_rc.report.run import NotARunError as NotARunError
from flowgrpo_rc.report.run import Run as Run
from flowgrpo_rc.report.run import read_run as read_run
