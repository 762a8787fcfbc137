"""Ports on loopback that are kept free for a process which does not run yet."""

import socket


class KeptPort:
    """A port that is bound and does not listen.

    Connections to it are refused, and the kernel gives it to no other process. A connector may listen on it all the
    same, because both set SO_REUSEADDR, and so may its successor.
    """

    def __init__(self, number: int = 0) -> None:
        """Keep this port, or any free one. Raises OSError when the port is taken."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", number))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """The port as "host:port"."""
        return f"127.0.0.1:{self.number}"

    def close(self) -> None:
        """Give the port up."""
        self._socket.close()
