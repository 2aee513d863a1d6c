# SPDX-License-Identifier: Apache-2.0
"""The error of this package."""

from __future__ import annotations


class ReportError(Exception):
    """A report cannot be made. str(error) is a sentence: the file, what was expected and got.

    `status` is the exit status of the command: 2 for a refused input, 1 for anything else.
    """

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status
