# SPDX-License-Identifier: Apache-2.0
"""The package deep_ep for processes that have this folder's parent in PYTHONPATH."""

import libep.deep_ep

libep.deep_ep.install()
