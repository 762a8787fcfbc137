"""The backend's connection to one peer: made at pairing, and again after it has broken while both processes live."""

import logging
import time
from collections.abc import Callable

from pdpool_connector.backends.base import BackendError, TransferBackend
from pdpool_connector.layout.memory import RemoteMemory

log = logging.getLogger(__name__)


class DataConnection:
    """For one thread at a time. `retry_s`: after a try to connect again that failed, writes fail at once for this long.

    `clock`: monotonic seconds.
    """

    def __init__(
        self,
        backend: TransferBackend,
        peer: str,
        remote: RemoteMemory,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._peer, self._remote, self._retry_s, self._clock = backend, peer, remote, retry_s, clock
        self._retry_at = 0.0
        self.failure = ""
        """Why the last try to connect failed, or ""."""

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
        """False for a while after a try to connect again that failed."""
        return self._clock() >= self._retry_at

    def connect_again(self, why: str) -> None:
        """Replace the connection, over which nothing may be under way; `failure` says why that failed."""
        begun, was_down = self._clock(), bool(self.failure)
        if not was_down:
            log.warning("the data connection to peer %s has broken and is made again: %s", self._peer[:8], why)
        self._backend.disconnect(self._peer)
        error = self.connect()
        self.failure = str(error) if error is not None else ""
        if error is None:
            log.warning("the data connection to peer %s is back after %.2f s", self._peer[:8], self._clock() - begun)
            return
        self._retry_at = self._clock() + self._retry_s
        if not was_down:
            log.warning(
                "there is no data connection to peer %s; tried every %.0f s when something is to be moved: %s",
                self._peer[:8],
                self._retry_s,
                error,
            )

    def close(self) -> None:
        """Give up the connection."""
        self._backend.disconnect(self._peer)
