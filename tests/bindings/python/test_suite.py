# SPDX-License-Identifier: Apache-2.0
"""The common suite over libep itself."""

from refusals import *  # noqa: F403
from suite import *  # noqa: F403
