"""Errors about wrong types and shapes, in a process without the tests' own type checks, which would come first."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CALLS = """
import json
import torch
from flowgrpo_rc.correction import RolloutCorrectionConfig, compute_rollout_correction_and_rejection_mask as correct

def message(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]

z = torch.zeros
pair = (z(2, 2), z(2, 2))
print(json.dumps([
    message(correct, z(2, 3), z(3, 2)),
    message(correct, z(2, 3), z(2, 3), z(2, 1)),
    message(correct, z(2, 3, 4), z(2, 3, 4)),
    message(correct, z(2, 3, dtype=torch.int64), z(2, 3)),
    message(correct, *pair, rollout_rs=["token_k1"], rollout_rs_threshold="0.5_2.0"),
    message(RolloutCorrectionConfig.from_dict, "token_is"),
]))
"""


def test_messages():
    run = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=600, check=True)
    shapes = "log_prob has shape (2, 3), but "
    assert json.loads(run.stdout) == [
        ["ValueError", f"{shapes}rollout_log_prob has shape (3, 2)."],
        ["ValueError", f"{shapes}mask has shape (2, 1)."],
        ["ValueError", "log_prob must be (B,) or (B, T), got shape (2, 3, 4)."],
        ["TypeError", "log-probs must be floating point, got log_prob torch.int64 and rollout_log_prob torch.float32."],
        ["TypeError", "rollout_rs must be a string or null, got ['token_k1']."],
        [
            "ValueError",
            "rollout_correction must be a mapping of keys, or null, got 'token_is'; a preset is chosen by the key "
            "preset.",
        ],
    ]
