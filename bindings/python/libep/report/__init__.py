# SPDX-License-Identifier: Apache-2.0
"""Reports: results and routing traces of ep_bench as one page with pictures and tables.

    python -m libep.report FILE... -o report.html

write_report() does the same from a program. It needs matplotlib, the extra libep[report].
docs/benchmarking.md of the source tree says what each picture shows.
"""

from ._command import write_report
from ._input import ReportError

__all__ = ["ReportError", "write_report"]
