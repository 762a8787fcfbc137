"""Keys of the control channel: CURVE authenticates and encrypts it, one set of keys for all processes of a service.

Keys are rotated with overlap. A process listens with the first key of its set, and admits clients with any key of the
set. A client tries the keys of its own set in turn. So a rotation has three steps: add the new key behind the old one
everywhere, then put it first, then drop the old one.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

MAX_KEYS: Final = 4
KEY_CHARS: Final = 40
_Z85 = Annotated[str, msgspec.Meta(min_length=KEY_CHARS, max_length=KEY_CHARS)]


class KeysError(ValueError):
    """A file of keys that cannot be used; the message says which, and never shows its content."""


class CurveKey(NamedTuple):
    """A pair of keys, each 40 characters of Z85 (ZeroMQ RFC 32), as `zmq.curve_keypair` makes them."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret, for logs and tracebacks."""
        return f"CurveKey(public={self.public!r})"

    def fits(self) -> bool:
        """Whether both are keys, and the public one belongs to the secret one."""
        if not (type(self.public) is bytes and type(self.secret) is bytes and len(self.secret) == KEY_CHARS):
            return False
        try:
            return bool(zmq.curve_public(self.secret) == self.public)
        except (ValueError, zmq.ZMQError):
            return False


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    public: _Z85
    secret: _Z85


def read_keys(path: Path | str) -> tuple[CurveKey, ...]:
    """The keys in a file: a JSON list of {"public": ..., "secret": ...}, the one to listen with first.

    Raises KeysError.
    """
    try:
        pairs = msgspec.json.decode(Path(path).read_bytes(), type=list[_Pair])
        keys = tuple(CurveKey(pair.public.encode("ascii"), pair.secret.encode("ascii")) for pair in pairs)
        fitting = all(key.fits() for key in keys)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeEncodeError, ValueError, zmq.ZMQError):
        raise KeysError(f"{path} must be a JSON list of objects with public and secret, each 40 characters") from None
    if not fitting:
        raise KeysError(f"{path} has a pair whose public key does not belong to its secret key")
    if not 1 <= len(keys) <= MAX_KEYS:
        raise KeysError(f"{path} has {len(keys)} pairs of keys, must have 1..{MAX_KEYS}")
    return keys


def make_key() -> CurveKey:
    """A fresh pair."""
    return CurveKey(*zmq.curve_keypair())


class _Known:
    """Gives the authenticator the keys that may connect."""

    def __init__(self, keys: Sequence[CurveKey]) -> None:
        self._public = frozenset(key.public for key in keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key (Z85) may connect."""
        del domain
        return key in self._public


class CurveAuthenticator:
    """Accepts clients with known keys, for all listening sockets of one context, in a thread until `close`."""

    def __init__(self, context: zmq.Context[Any], keys: Sequence[CurveKey], close_s: float) -> None:
        """`close_s`: the thread may take this long to end."""
        self._close_s = close_s
        self._authenticator: Any = ThreadAuthenticator(context)  # its types deny that `pipe` may be None
        try:
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=_Known(keys))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the thread. Idempotent; the next call completes one that was interrupted."""
        if (pipe := self._authenticator.pipe) is not None:
            # By our own hands: `stop` would wait for ever for a thread that was not begun, or has ended since it knew.
            with contextlib.suppress(zmq.ZMQError):
                pipe.send(b"TERMINATE", zmq.DONTWAIT)
            if self._authenticator.is_alive():
                self._authenticator.thread.join(self._close_s)
            pipe.close()
            self._authenticator.pipe = None
        self._authenticator.stop()


def listen_with(socket: zmq.Socket[Any], key: CurveKey) -> None:
    """Configure a socket, before it is bound, to accept clients with CURVE only."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = key


def connect_with(socket: zmq.Socket[Any], key: CurveKey) -> None:
    """Configure a socket, before it is connected, to use CURVE with a server of the same key."""
    socket.curve_serverkey = key.public
    socket.curve_publickey, socket.curve_secretkey = key
