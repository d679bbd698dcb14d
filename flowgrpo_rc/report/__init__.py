"""Is this run healthy? Checks on the logged metrics, and one page that shows them.

Needs no torch: metrics are plain numbers, so the checks also work on rows of another trainer.
"""

from flowgrpo_rc.report.finding import Finding as Finding
from flowgrpo_rc.report.finding import worst as worst
from flowgrpo_rc.report.health import check_health as check_health
from flowgrpo_rc.report.page import NotARunError as NotARunError
from flowgrpo_rc.report.page import Run as Run
from flowgrpo_rc.report.page import build_page as build_page
from flowgrpo_rc.report.page import read_run as read_run
from flowgrpo_rc.report.page import write_report as write_report
