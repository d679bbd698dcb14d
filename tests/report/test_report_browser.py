"""The page in a real browser without a network: nothing missing, nothing asked for, nothing out of place."""

import pytest
from browser import Browser, find_chromium
from PIL import Image
from rows import COLLAPSING, folder, rows

from flowgrpo_rc.report import read_run, write_report

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium found; `make browser` installs it, or set CHROMIUM to its path"
)
CHECK = """(async () => {
  await Promise.all(Array.from(document.images).map(image => image.decode().catch(() => null)));
  const box = element => element.getBoundingClientRect();
  const clipped = Array.from(document.querySelectorAll('h1,h2,h3,p,dd,dt,.verdict,figure,li'))
    .filter(e => e.offsetParent && !e.closest('.grid') && box(e).right > innerWidth + 1).length;
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  return {wide: document.documentElement.scrollWidth - innerWidth, clipped, dark,
    images: Array.from(document.images).map(image => image.naturalWidth),
    shown: Array.from(document.images).map(image => Math.round(box(image).width)),
    ground: getComputedStyle(document.body).backgroundColor,
    verdict: document.querySelector('.verdict').innerText, height: document.documentElement.scrollHeight};
})()"""


@pytest.fixture(scope="module")
def browser():
    with Browser(find_chromium()) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a healthy and of a collapsing run."""
    root = tmp_path_factory.mktemp("runs")
    made = {"healthy": rows(), "collapsing": rows(30, **COLLAPSING)}
    return {name: write_report(read_run(folder(root / name, content)))[0] for name, content in made.items()}


def colours(path):
    """How many colours a screenshot has, coarsely."""
    with Image.open(path) as image:
        return image.size, len(image.convert("RGB").resize((150, 400)).getcolors(60000))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390, 320])
@pytest.mark.parametrize("name", ["healthy", "collapsing"])
def test_the_page_in_a_browser(browser, pages, tmp_path, name, width, dark):
    browser.open(pages[name], width, dark=dark)
    state = browser.run(CHECK)
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]
    assert state["wide"] <= 0
    assert state["clipped"] == 0
    assert len(state["images"]) >= 8
    assert min(state["images"]) > 100
    assert min(state["shown"]) > 200
    assert state["dark"] == dark
    assert (state["ground"] == "rgb(18, 22, 28)") == dark
    assert ("Problem" in state["verdict"]) == (name == "collapsing")
    browser.screenshot(tmp_path / "page.png")
    size, count = colours(tmp_path / "page.png")
    assert size == (width, state["height"])
    assert count > 100


def test_the_tables_open_without_pushing_the_page_wide(browser, pages):
    for width in (1200, 390):
        browser.open(pages["collapsing"], width)
        browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
        state = browser.run(CHECK)
        assert state["wide"] <= 0
        assert browser.run("document.querySelectorAll('details td').length") > 100
