"""Looks host names up without waiting for those that get no answer."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

from pdpool_connector.transport.address import Address, is_ip, pick_allowed

MAX_LOOKUPS = 32
"""Names that are looked up at a time, each in a thread: the system's resolver blocks for as long as it likes."""


class Resolver:
    """Finds the IP address of a host that may be contacted. For coroutines of one loop."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = networks
        self._underway: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, address: Address) -> Address:
        """The first of its IP addresses that lies in an allowed network; it alone is to be contacted.

        Raises AddressError when nothing allowed is found, OSError when the name cannot be looked up.
        """
        ips = [address.host] if is_ip(address.host) else await self._look_up(address.host)
        return pick_allowed(address, ips, self._networks)

    async def _look_up(self, host: str) -> list[str]:
        """Ask the system. Calls for a name that is being looked up wait for the same answer."""
        answer = self._underway.get(host)
        if answer is None:
            if len(self._underway) >= MAX_LOOKUPS:
                raise OSError(f"{MAX_LOOKUPS} names are being looked up, which is the limit")
            answer = asyncio.get_running_loop().create_future()
            # Not the loop's own executor: a lookup that hangs would be waited for at the end of the process.
            thread = threading.Thread(target=self._ask, args=(host, answer), name="pdpool-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                raise OSError(f"{host} cannot be looked up: {error}") from None
            self._underway[host] = answer
        return await asyncio.shield(answer)

    def _ask(self, host: str, answer: asyncio.Future[list[str]]) -> None:
        ips: list[str] = []
        error: OSError | None = None
        try:
            ips = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except OSError as failure:
            error = failure
        except UnicodeError as failure:
            error = OSError(f"{host!r} is no host name: {failure}")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile, and no call waits
            answer.get_loop().call_soon_threadsafe(self._found, host, answer, ips, error)

    def _found(self, host: str, answer: asyncio.Future[list[str]], ips: list[str], error: OSError | None) -> None:
        del self._underway[host]
        if error is None:
            answer.set_result(ips)
        else:
            answer.set_exception(error)
            answer.exception()  # all who asked may have given up
