"""One side of an experiment in a process of its own: a line of JSON in, a line of JSON out.

The writer writes the same pages to the target until it is killed or the peer fails. It has several writes under way,
as a connector under load has. The parent looks into the target's memory itself.
"""

import os
import sys
from collections import deque
from typing import Any

import msgspec
import numpy as np
from pdpool_connector import HostArena, KVMemory
from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import BackendError, Poll
from pdpool_connector.backends.mooncake import MooncakeBackend
from pdpool_connector.backends.nixl import NixlBackend
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import RemoteMemory, decode_remote, encode_remote

from proof.fences.plan import DEPTH, LAYERS, MARK, PAGES, Geometry, geometry


class Side:
    """What the process holds."""

    def open(self, backend: str, name: str, size: str, *, target: bool) -> dict[str, str]:
        """Register an arena; a writer's is full of the mark."""
        self._geometry = geometry(size)
        self._backend = open_backend(backend, name, target=target)
        self._arena = HostArena(self._geometry.nbytes)
        memory = _memory(self._arena, self._geometry)
        if not target:
            self._arena.array(0, self._geometry.nbytes, np.uint8)[:] = MARK
        descriptor = self._backend.register(memory)
        remote = RemoteMemory(backend=self._backend.name, memory=memory, descriptor=descriptor)
        return {
            "remote": encode_remote(remote).hex(),
            "location": msgspec.json.encode(self._arena.location()).decode(),
        }

    def connect(self, peer: str, remote: str) -> dict[str, str]:
        """Pair with the target."""
        self._backend.connect(peer, decode_remote(bytes.fromhex(remote)))
        return {}

    def write_on(self, peer: str) -> dict[str, str]:
        """Write until it fails; the answer comes before."""
        _answer({})
        pages = np.arange(PAGES, dtype=np.int32)
        chunk = Chunk(pages, pages)
        handles = deque(self._backend.submit(peer, chunk) for _ in range(DEPTH))
        while True:
            handle = handles.popleft()
            match self._backend.poll(handle):
                case Poll.PENDING:
                    handles.append(handle)
                case Poll.DONE:
                    handles.append(self._backend.submit(peer, chunk))
                case _:
                    return {"failure": handle.failure}

    def deregister(self) -> dict[str, str]:
        """Tear the registration down and leave the rest of the backend as it is, where a backend can do that."""
        match self._backend:
            case NixlBackend() as nixl:
                nixl._agent.deregister(nixl._registered)
            case MooncakeBackend() as mooncake:
                mooncake._session.deregister(mooncake._blocks)
            case _:
                raise BackendError(f"backend {self._backend.name} has no registration apart from its arena")
        return {}

    def close(self) -> dict[str, str]:
        """Close the backend: registration, threads, connections. The memory stays mapped."""
        self._backend.close()
        return {}


def _memory(arena: HostArena, shape: Geometry) -> KVMemory:
    region = PAGES * shape.item_bytes
    return KVMemory(
        kv=tuple(arena.region(index * region, shape.item_bytes, PAGES) for index in range(2 * LAYERS)),
        aux=(arena.region(2 * LAYERS * region, 64, 1),),
        page_tokens=16,
        layers=LAYERS,
        kv_heads=1,
        head_dim=shape.item_bytes // 64,
        dtype="float32",
        model="fences",
    )


def _answer(document: dict[str, Any]) -> None:
    os.write(_answers, msgspec.json.encode(document) + b"\n")


# Libraries write to stdout, too: the answers get a descriptor of their own.
_answers = os.dup(1)


def main() -> None:
    """Obey until stdin ends."""
    os.dup2(2, 1)
    side = Side()
    for line in sys.stdin:
        arguments = msgspec.json.decode(line)
        try:
            answer = getattr(side, arguments.pop("command"))(**arguments)
        except BackendError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _answer(answer)


if __name__ == "__main__":
    main()
