"""The soak's decode process without one of its safety mechanisms: the soak must notice.

`PDPOOL_BREAK` names the mechanism. `release`: pages are given back when a hand-off ends, while writes to them are on
their way, as by an engine that frees on abort. `keep`: ended hand-offs stay in the table.
"""

import os

from msgspec.structs import replace
from pdpool_connector import DecodeConnector

from proof.soak.decode import main

publish = DecodeConnector._publish


def release(self, report) -> None:
    status = report.status
    publish(self, replace(report, status=replace(status, releasable=True)) if status.ended else report)


def keep(self, report) -> None:
    kept = self._transfers.get(report.handle)
    publish(self, report)
    if kept is not None:
        self._transfers.add(kept)


if __name__ == "__main__":
    DecodeConnector._publish = {"release": release, "keep": keep}[os.environ["PDPOOL_BREAK"]]
    main()
