"""docs/report.md against the code: every check with its limits, and the example runs."""

import re
from pathlib import Path

from flowgrpo_rc.report.health import CHECKS
from flowgrpo_rc.report.history import WINDOW, History

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text()
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.M)}


def test_every_check_has_its_row_with_its_limits_and_advice():
    assert set(ROWS) == {check.name for check in CHECKS}
    for check in CHECKS:
        row = ROWS[check.name]
        for text in (check.title, check.advice_for(History([]))):
            assert text in row, (check.name, text)
        for limits in filter(None, (check.sde, check.tokens)):
            assert (check.limits or limits.words()) in row, check.name
        assert ("not checked" in row) == (check.tokens is None)


def test_the_example_runs(capsys):
    assert f"the last {WINDOW} training steps" in PAGE
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S).group(1), scope)
    assert "problem is_mean" in capsys.readouterr().out
    assert scope["findings"][0].limit == 0.5
