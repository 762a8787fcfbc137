"""Keeps a rank registered at the registry of its instance, for as long as it lives."""

import asyncio
import logging
import time

from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport.bootstrap import BootstrapClient, BootstrapError, Registration

log = logging.getLogger(__name__)

RENEWALS = 3
"""How often a lease is renewed in its own time: two renewals may be lost."""


class LeaseKeeper:
    """Registers one rank, renews in time, and tries on when that fails; a failure is logged when it begins.

    `failure` may be read from any thread: why the last try failed, or "".
    """

    def __init__(self, client: BootstrapClient, registry: str, registration: Registration, timeouts: Timeouts) -> None:
        self._client, self.registry, self._registration, self._timeouts = client, registry, registration, timeouts
        self.failure = "not registered yet"
        self.since = time.monotonic()
        """When `failure` last became or ceased to be "", on the monotonic clock."""

    async def run(self) -> None:
        """Never returns; to be cancelled."""
        while True:
            try:
                lease_s = await self._client.register(self.registry, self._registration, self._timeouts.registry_s)
            except Exception as error:  # noqa: BLE001 - any error may pass; until then the instance lacks its rank
                expected = isinstance(error, BootstrapError)
                self._note(str(error) if expected else f"{type(error).__name__}: {error}")
                await asyncio.sleep(self._timeouts.lease_retry_s)
            else:
                self._note("")
                await asyncio.sleep(lease_s / RENEWALS)

    def _note(self, failure: str) -> None:
        rank = self._registration.info.rank
        if failure and failure != self.failure:
            log.warning("rank %d is not registered: %s", rank, failure)
        elif self.failure and not failure:
            log.info("rank %d is registered at %s", rank, self.registry)
        if bool(failure) != bool(self.failure):
            self.since = time.monotonic()
        self.failure = failure
