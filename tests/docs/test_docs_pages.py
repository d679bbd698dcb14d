"""The pages of the documentation do what they say: their blocks run, and print what they show."""

import pytest
from doc_page import assert_shown, blocks, run_page


def test_quickstart(tmp_path, monkeypatch):
    scope = run_page("quickstart.md", tmp_path, monkeypatch)
    scope["trainer"].folder.close()
    assert (tmp_path / "outputs/first_run/report.html").is_file()


def test_output_is_compared_number_by_number():
    shown = "gap 0.22 in 25 checks\n... 1.5e-04"
    assert_shown(shown, "gap 0.22 in 25 checks\nabc\ndef 1.6e-04\n", "page")
    for printed in ("gap 0.24 in 25 checks\nabc 1.5e-04", "gap 0.22 in 26 checks\nabc 1.5e-04", "gap 0.22"):
        with pytest.raises(AssertionError, match="page shows"):
            assert_shown(shown, printed, "page")


def test_blocks_have_their_lines():
    first = blocks("quickstart.md")[0]
    assert (first.language, first.title) == ("bash", None)
    assert first.text.startswith("pip install")
