# SPDX-License-Identifier: Apache-2.0
"""megatron-core's MoELayer with its flex dispatcher, and torchtitan's MoE with its dispatcher for
DeepEP, on libep, forward and backward."""

import base
import pytest
from dense import CASES

PROGRAMS = {"megatron-core": "megatron_layers.py", "torchtitan": "torchtitan_layers.py"}
# torchtitan's experts compute in bfloat16. The router's gradient sums differences of what they
# return: seed 645241997 has an error of 0.047 there.
TOLERANCES = {"megatron-core": 1e-5, "torchtitan": 0.08}
BACKENDS = {"megatron-core": ("deepep", "hybridep"), "torchtitan": ("deepep",)}
seed = base.seed


@pytest.mark.parametrize("name", CASES)
def test_layer(ranks, seed, name):
    for backend in BACKENDS[ranks.release]:
        for differences in ranks.play("step", name=name, backend=backend, seed=seed):
            assert max(differences.values()) < TOLERANCES[ranks.release], differences


def test_example_learns(ranks):
    for losses in ranks.play("train", steps=15):
        assert losses[-1] < 0.9 * losses[0], losses
