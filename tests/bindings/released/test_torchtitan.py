# SPDX-License-Identifier: Apache-2.0
"""torchtitan's MoE with its dispatcher for DeepEP on libep, forward and backward."""

from __future__ import annotations

import base
import pytest
from conftest import need
from dense import CASES

need("torchtitan")

PROGRAM = "torchtitan_layers.py"
seed = base.seed


@pytest.mark.parametrize("name", CASES)
def test_layer(ranks, seed, name):
    """The experts compute in bfloat16."""
    for differences in ranks.play("step", name=name, seed=seed):
        assert max(differences.values()) < 0.03, differences


def test_example_learns(ranks):
    for losses in ranks.play("train", steps=15):
        assert losses[-1] < 0.9 * losses[0], losses
