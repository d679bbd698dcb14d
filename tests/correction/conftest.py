import pytest

from flowgrpo_rc.correction import native


@pytest.fixture(params=["extension", "torch"])
def both_passes(request, monkeypatch):
    """The test once with the C extension and once as where it is not built."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_native", None)
    elif not native.is_built():
        pytest.skip("the C extension is not built: there was no C compiler when the package was installed")
