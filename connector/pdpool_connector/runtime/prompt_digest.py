"""Digest of a prompt, by which two engines recognize the same request where they have only a room in common."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pdpool_connector.protocol.frames import PROMPT_BYTES

INT32 = np.iinfo(np.int32)


def prompt_digest(tokens: Sequence[int] | NDArray[np.int32], also: bytes = b"") -> bytes:
    """Digest of a prompt's token ids (int32), for `open` on both sides: BLAKE2b of 16 bytes over little-endian int32.

    `also`: anything else that cache and first token depend on (an adapter, an image, sampling parameters), in the same
    form on both sides. Raises OverflowError for a token that is no int32, TypeError for other than whole numbers.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"tokens are {ids.ndim}-dimensional, of dtype {ids.dtype}: give a sequence of whole numbers")
    if ids.size and not (INT32.min <= ids.min() and ids.max() <= INT32.max):
        raise OverflowError(f"tokens are {ids.min()}..{ids.max()}, must be int32")
    key = blake2b(also, digest_size=PROMPT_BYTES).digest() if also else b""
    return blake2b(ids.astype("<i4").tobytes(), digest_size=PROMPT_BYTES, key=key).digest()
