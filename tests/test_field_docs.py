"""``help()`` of every configuration class shows every field, with the text that stands below it in the source."""

import dataclasses
import importlib
import pydoc
import subprocess
import sys

import pytest

from flowgrpo_rc.field_docs import documented_fields, field_texts

CONFIGS = ("actor", "trainer", "rollout", "models", "rewards", "data", "correction.options")
MODULES = (*(f"{room}.config" for room in CONFIGS), "rewards.ocr")


def config_classes():
    for name in MODULES:
        module = importlib.import_module(f"flowgrpo_rc.{name}")
        for name, value in vars(module).items():
            if name.endswith("Config") and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                yield value


CLASSES = list(config_classes())


def on_one_line(text):
    return " ".join(text.split())


def test_all_sections_are_among_the_classes():
    assert {"FlowGRPOConfig", "DiffusionLossConfig", "RolloutCorrectionConfig", "ModelConfig", "OCRConfig"} <= {
        cls.__name__ for cls in CLASSES
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_shows_every_field_with_its_text(cls):
    page = pydoc.render_doc(cls, renderer=pydoc.plaintext).replace(" |  ", " ")
    shown = " " + on_one_line(page.partition("Fields:")[2])
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        assert len(texts.get(field.name, "")) > 5, f"{cls.__name__}.{field.name} has no text below it"
        text = on_one_line(texts[field.name])
        start = shown.index(f" {field.name}: ")
        assert text in shown[start:], f"{cls.__name__}.{field.name}"


def test_a_default_stands_beside_its_field():
    from flowgrpo_rc.actor.config import OptimizerConfig

    shown = pydoc.render_doc(OptimizerConfig, renderer=pydoc.plaintext)
    assert "lr: PositiveFloat = 0.0001" in shown
    assert "Learning rate." in shown


def test_a_class_without_a_source_file_keeps_its_docstring():
    space = {"dataclasses": dataclasses}
    exec("@dataclasses.dataclass\nclass Made:\n    'What it is.'\n    size: int = 3\n    'How large.'\n", space)
    made = documented_fields(space["Made"])
    assert made.__doc__.startswith("What it is.\n\nFields:\n    size: int = 3")


IMPORTS = """
import sys
import flowgrpo_rc.trainer.config
import ast
before = ast.parse
calls = []
ast.parse = lambda *given, **more: calls.append(given) or before(*given, **more)
import importlib
for name in {names!r}:
    importlib.reload(importlib.import_module(f"flowgrpo_rc.{{name}}"))
assert calls == [], calls
flowgrpo_rc.trainer.config.TrainerConfig.__doc__
assert calls
"""


def test_importing_a_configuration_parses_no_source():
    code = IMPORTS.format(names=MODULES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
