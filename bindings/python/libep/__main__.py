# SPDX-License-Identifier: Apache-2.0
from ._info import main

main()
