"""The soak's decode process with a safety mechanism taken out, to see that the soak notices.

`PDPOOL_BREAK` names which: `release` gives pages back when a hand-off ends, even with writes on their way to them, as
an engine does that frees on abort; `keep` forgets to forget what has ended.
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
        self._transfers[report.handle] = kept


if __name__ == "__main__":
    DecodeConnector._publish = {"release": release, "keep": keep}[os.environ["PDPOOL_BREAK"]]
    main()
