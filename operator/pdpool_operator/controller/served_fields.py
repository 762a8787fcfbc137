"""Knows which fields the installed CRDs do not have, reports them, and leaves them out of statuses."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..api import served
from ..api.names import GROUP, VERSION
from ..runtime.api import Api
from ..runtime.api_errors import ApiError

log = logging.getLogger(__name__)


class ServedFields:
    """The fields that the CRDs in the cluster lack, as of the last `check`.

    `report` gets all of them after every check, each as `Kind.path`. An empty list means that the CRDs are complete.
    """

    def __init__(self, api: Api, report: Callable[[list[str]], None]) -> None:
        self._api = api
        self._report = report
        self._wanted = served.wanted()
        self._missing: dict[str, frozenset[str]] = {}

    async def check(self) -> None:
        """Compare the served CRDs with those of this version. An API server that cannot be asked changes nothing."""
        try:
            kinds = served.served(await self._api.openapi(GROUP, VERSION))
        except ApiError as error:
            log.warning("cannot check the fields of the installed CRDs: %s", error)
            return
        missing = {
            kind: frozenset(served.missing_fields(schema, kinds[kind]))
            for kind, schema in self._wanted.items()
            if kind in kinds
        }
        if missing != self._missing:
            for kind, fields in missing.items():
                if fields:
                    log.warning(
                        "the installed CRD of %s lacks %s: settings there have no effect, and a status is written "
                        "without them; install the CRDs of this version",
                        kind,
                        ", ".join(sorted(fields)),
                    )
        self._missing = missing
        self._report(sorted(f"{kind}.{path}" for kind, fields in missing.items() for path in fields))

    def storable(self, kind: str, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status without the fields that the installed CRD lacks."""
        missing = self._missing.get(kind)
        if not missing:
            return dict(status)
        kept: dict[str, Any] = served.without(status, missing)
        return kept
