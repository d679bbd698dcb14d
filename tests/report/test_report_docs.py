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
        for text in (check.title, check.reason, check.advice_for(History([]))):
            assert text in row, (check.name, text)
        for limits in filter(None, (check.sde, check.tokens)):
            assert (check.limits or limits.words()) in row, check.name
        assert ("not checked" in row) == (check.sde is None or check.tokens is None)


def test_the_window_and_the_tests_that_the_page_names():
    assert f"the last {WINDOW} training steps" in PAGE
    files = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert named
    assert all(f"def {name}(" in files for name in named)


def test_the_example_runs(capsys):
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S).group(1), scope)
    assert "problem is_mean" in capsys.readouterr().out
    assert scope["findings"][0].limit == 0.5


def test_the_picture_is_small():
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size < 200_000
