"""The page in a real browser without a network: every picture decodes, and nothing is out of place."""

import json
import os
import re
import shutil
import subprocess

import pytest
from PIL import Image
from rows import COLLAPSING, folder, rows

from flowgrpo_rc.report import read_run, write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium found; `make browser` installs it, or set CHROMIUM to its path"
    ),
]
MEASURE = """<script>addEventListener('load', async () => {
  document.querySelectorAll('details').forEach(part => part.open = location.hash == '#open');
  await Promise.all(Array.from(document.images).map(image => image.decode().catch(() => null)));
  const box = element => element.getBoundingClientRect();
  const clipped = Array.from(document.querySelectorAll('h1,h2,h3,p,dd,dt,.verdict,figure,li'))
    .filter(e => e.offsetParent && !e.closest('.grid') && box(e).right > innerWidth + 1).length;
  document.title = 'MEASURED' + JSON.stringify({wide: document.documentElement.scrollWidth - innerWidth, clipped,
    images: Array.from(document.images).map(image => image.naturalWidth), inner: innerWidth,
    ground: getComputedStyle(document.body).backgroundColor, cells: document.querySelectorAll('details td').length});
})</script>"""


def chromium(page, width, *flags):
    """The DOM of a page after loading."""
    usual = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
    network = "--host-resolver-rules=MAP * ~NOTFOUND"
    budget = "--virtual-time-budget=20000"
    command = [CHROMIUM, *usual, network, budget, f"--window-size={width},900", *flags, page]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measured(page, width, scheme):
    """The title that the page's script sets. On a busy machine Chromium's virtual time may end before its pictures are
    decoded in real time; then it is asked again."""
    for _ in range(20):
        found = re.search(r"<title>MEASURED(.*?)</title>", chromium(page, width, scheme, "--dump-dom"))
        if found:
            return json.loads(found.group(1))
    raise AssertionError("the page was never measured")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a healthy and of a collapsing run, with a script that measures them."""
    root = tmp_path_factory.mktemp("runs")
    made = {}
    for name, content in {"healthy": rows(), "collapsing": rows(30, **COLLAPSING)}.items():
        page = write_report(read_run(folder(root / name, content)))[0]
        page.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
        made[name] = page
    return made


@pytest.mark.parametrize(("name", "width", "dark"), [("healthy", 1200, False), ("collapsing", 500, True)])
def test_the_page_in_a_browser(pages, tmp_path, name, width, dark):
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    for fragment in ("", "#open"):
        state = measured(pages[name].as_uri() + fragment, width, scheme)
        assert state["inner"] == width
        assert (state["wide"], state["clipped"]) == (0, 0)
        assert len(state["images"]) >= 8
        assert min(state["images"]) > 100
        assert (state["ground"] == "rgb(18, 22, 28)") == dark
        assert state["cells"] > 100
    shot = tmp_path / "page.png"
    chromium(pages[name].as_uri(), width, scheme, f"--screenshot={shot}")
    with Image.open(shot) as image:
        assert len(image.convert("RGB").resize((150, 400)).getcolors(60000)) > 100
