"""``flowgrpo-rc report``: is this run healthy, as text and as one page."""

import argparse
from pathlib import Path
from typing import Any

UNHEALTHY = 3
"""Exit code of a report that found a problem."""


def add_report(commands: Any) -> None:
    """Adds the command to the parser's ``commands``."""
    text = "say whether a run is healthy, and write one HTML page about it"
    command = commands.add_parser(
        "report",
        help=text,
        description=f"{text[0].upper()}{text[1:]}; also of a run that is still going on. Exit code: 0 no problem, "
        f"{UNHEALTHY} a problem found, 2 refused (not a run folder, or nothing in it yet).",
    )
    command.add_argument("folder", metavar="RUN_DIR", type=Path, help="a run folder: outputs/PROJECT/EXPERIMENT")
    command.add_argument("--out", type=Path, help="the HTML file (RUN_DIR/report.html)")
    command.set_defaults(run=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Checks, writes, prints; returns the exit code."""
    from flowgrpo_rc.report import read_run, worst, write_report

    run = read_run(arguments.folder)
    path, findings = write_report(run, arguments.out)
    print(f"{as_text(findings, run)}\nWritten: {path}")
    return UNHEALTHY if worst(findings) == "problem" else 0


def as_text(findings: Any, run: Any) -> str:
    """The verdict, and what is not healthy with what to do."""
    from flowgrpo_rc.report.setting import headline

    lines = [headline(findings, run.history), *run.notes]
    for finding in findings:
        if finding.level != "ok":
            lines += [
                f"  {finding.level:8} {finding.check}: {finding.measured} ({finding.band})",
                f"           {finding.advice}",
            ]
    return "\n".join(lines)
