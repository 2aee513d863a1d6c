# SPDX-License-Identifier: Apache-2.0
"""Paths and fixtures of the tests of libep itself."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../common")]

import base  # noqa: E402

seed, nodes = base.seed, base.make_nodes(*base.NODES)
