"""The backend's connection to one peer: made when they meet, and anew where it has broken while both processes live."""

import logging
import time
from collections.abc import Callable

from pdpool_connector.backends.base import BackendError, TransferBackend
from pdpool_connector.layout.memory import RemoteMemory

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""After a try to connect anew that was in vain, what is submitted fails at once for so long."""


class DataConnection:
    """For one thread at a time. `clock`: monotonic seconds."""

    def __init__(
        self, backend: TransferBackend, peer: str, remote: RemoteMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend, self._peer, self._remote, self._clock = backend, peer, remote, clock
        self._retry_at = 0.0
        self.failure = ""
        """Why the last try to connect was in vain, or ""."""

    def connect(self) -> BackendError | None:
        """Make the connection; may block as `TransferBackend.connect`. Returns why there is none."""
        try:
            self._backend.connect(self._peer, self._remote)
        except BackendError as error:
            return error
        except Exception as error:
            log.exception("backend %s failed to connect peer %s", self._backend.name, self._peer[:8])
            return BackendError(f"{type(error).__name__}: {error}")
        return None

    def worth_a_try(self) -> bool:
        """False for a while after a try to connect anew that was in vain."""
        return self._clock() >= self._retry_at

    def connect_anew(self, why: str) -> None:
        """Give up the connection, over which nothing may be under way, and make another; `failure` tells if in vain."""
        begun, was_down = self._clock(), bool(self.failure)
        if not was_down:
            log.warning("the data connection to peer %s has broken and is made anew: %s", self._peer[:8], why)
        self._backend.disconnect(self._peer)
        error = self.connect()
        self.failure = str(error) if error is not None else ""
        if error is None:
            log.warning("the data connection to peer %s is back after %.2f s", self._peer[:8], self._clock() - begun)
            return
        self._retry_at = self._clock() + RETRY_S
        if not was_down:
            log.warning(
                "there is no data connection to peer %s; tried every %.0f s when something is to be moved: %s",
                self._peer[:8],
                RETRY_S,
                error,
            )

    def close(self) -> None:
        """Give up the connection."""
        self._backend.disconnect(self._peer)
