# SPDX-License-Identifier: Apache-2.0
import sys

from ._info import main

sys.exit(main())
