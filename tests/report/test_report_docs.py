"""docs/report.md against the code: every check with its limits, and the example runs."""

import re
from pathlib import Path

from flowgrpo_rc.report.check import AS_SDE
from flowgrpo_rc.report.health import CHECKS
from flowgrpo_rc.report.history import WINDOW, History

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text()
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.M)}


def limits_of(check):
    """The cells of the columns "healthy" and "problem"."""
    if check.limits:
        return re.split(r"(?:^|, )(?:healthy|problem): |, (?=watch)", check.limits)[1:]
    cells = ends(check.sde)
    if check.tokens is None:
        return [f"SDE steps: {cells[0]}", cells[1]]
    if check.tokens is AS_SDE:
        return cells
    return [a if a == b else f"{a}; tokens: {b or 'none'}" for a, b in zip(cells, ends(check.tokens), strict=True)]


def ends(limits):
    healthy, _, problem = limits.words().removeprefix("healthy ").partition(", problem ")
    return [healthy, problem]


def test_every_check_has_its_row_with_its_limits_and_advice():
    assert set(ROWS) == {check.name for check in CHECKS}
    for check in CHECKS:
        _, title, *limits, _, advice = [cell.strip() for cell in ROWS[check.name].strip("|").split("|")]
        assert (title, advice) == (check.title, check.advice_for(History([])))
        assert limits == limits_of(check), check.name


def test_the_example_runs(capsys):
    assert f"the last {WINDOW} training steps" in PAGE
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S).group(1), scope)
    assert "problem is_mean" in capsys.readouterr().out
    assert scope["findings"][0].limit == 0.5
