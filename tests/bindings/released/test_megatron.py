# SPDX-License-Identifier: Apache-2.0
"""megatron-core's MoELayer with its flex dispatcher on libep, forward and backward."""

from __future__ import annotations

import base
import pytest
from conftest import need
from dense import CASES

need("megatron-core")

PROGRAM = "megatron_layers.py"
seed = base.seed


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@pytest.mark.parametrize("name", CASES)
def test_layer(ranks, seed, name, backend):
    for differences in ranks.play("step", name=name, backend=backend, seed=seed):
        assert max(differences.values()) < 1e-5, differences


def test_example_learns(ranks):
    for losses in ranks.play("train", steps=15):
        assert losses[-1] < 0.9 * losses[0], losses
