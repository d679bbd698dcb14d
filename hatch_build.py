"""Compiles the C extension of `flowgrpo_rc.correction` while the package is built, and goes on where that fails.

Without a C compiler (gcc or clang) and Python's headers the package works all the same: torch then does what the
extension does, several times slower. `flowgrpo_rc.correction.numerics.native.is_built()` tells.
"""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "flowgrpo_rc/correction/numerics/native"
# -O2: -O3 unrolls what is vectors already. The others let comparisons become masks; NaN and infinity stay themselves.
FLAGS = ["-O2", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


class NativeExtension(BuildHookInterface):
    """Puts the compiled module beside its sources for an editable install, else into the wheel alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel; `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        sources, editable = Path(self.root) / FOLDER, version == "editable"
        self._scratch = tempfile.TemporaryDirectory()
        try:
            module = compile_into(sources if editable else Path(self._scratch.name), sources)
        except Exception as error:  # whatever a missing or foreign compiler makes of it
            self.app.display_warning(f"flowgrpo_rc: the C extension was not built ({error}); torch does its work")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if not editable:
            build_data["force_include"][str(module)] = f"{FOLDER}/{module.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after the wheel is there."""
        if self.target_name == "wheel":
            self._scratch.cleanup()


def compile_into(folder: Path, sources: Path) -> Path:
    """Compiles `module.c`; returns the file made."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    digest = runpy.run_path(str(sources / "sources.py"))["digest"](sources)
    macros = [("SOURCES", f'"{digest}"')]
    extension = Extension("_native", [str(sources / "module.c")], define_macros=macros, extra_compile_args=FLAGS)
    with tempfile.TemporaryDirectory() as scratch:
        command = build_ext(Distribution({"name": "native", "ext_modules": [extension]}))
        command.build_lib, command.build_temp, command.force = str(folder), scratch, True
        command.ensure_finalized()
        command.run()
    return folder / command.get_ext_filename("_native")
