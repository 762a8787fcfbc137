"""Decoders of bytes from strangers: each may refuse them with its own error, and do nothing else."""

from collections.abc import Sequence
from typing import Any

import msgspec
from pdpool_connector.layout.memory import (
    KVMemory,
    LayoutError,
    Region,
    RemoteMemory,
    StateCut,
    StatePool,
    decode_remote,
    encode_remote,
)
from pdpool_connector.protocol import frames as f
from pdpool_connector.runtime.admin import AdminEndpoint
from pdpool_connector.transport import bootstrap, registry
from pdpool_connector.transport.http import Asked

from proof.fuzz.allowance import Allowance
from proof.fuzz.samples import A, Fuzzed, sample_frames


def frames() -> tuple[Fuzzed, Sequence[bytes]]:
    """`frames.decode`: what it accepts can be encoded again, and means the same."""
    allowance = Allowance()

    def fuzz(data: bytes) -> None:
        with allowance.for_input(data):
            try:
                frame = f.decode(data)
            except f.MalformedFrameError:
                return
        assert f.decode(f.encode(frame)) == frame

    return fuzz, [f.encode(frame) for frame in sample_frames()]


def memory() -> tuple[Fuzzed, Sequence[bytes]]:
    """`layout.memory.decode_remote`."""
    allowance = Allowance()

    def fuzz(data: bytes) -> None:
        with allowance.for_input(data):
            try:
                remote = decode_remote(data)
            except LayoutError:
                return
        decode_remote(encode_remote(remote))

    kv = (Region(4096, 512, 64), Region(1 << 20, 512, 64))
    aux, state = Region(1 << 21, 64, 16), Region(1 << 22, 128, 8)
    one = KVMemory(
        kv=kv,
        aux=(aux,),
        page_tokens=16,
        layers=1,
        kv_heads=2,
        head_dim=4,
        dtype="float32",
        model="m",
        state=(StatePool("mamba", (state,), cuts=(StateCut(2, (4, 4)),), rank=1, ranks=2),),
    )
    return fuzz, [encode_remote(RemoteMemory(backend="local", memory=one, descriptor=b"x" * 32))]


def json() -> tuple[Fuzzed, Sequence[bytes]]:
    """Bodies of the bootstrap registry in both directions, and of the admin endpoint behind a gate that admits all."""
    allowance = Allowance()
    handlers = list(AdminEndpoint(_Connector(), _Open()).handlers().values())  # type: ignore[arg-type] # as much as it asks
    decoders: Sequence[msgspec.json.Decoder[Any]] = (
        bootstrap._infos,
        bootstrap._leases,
        bootstrap._refusals,
        registry._registrations,
    )

    def fuzz(data: bytes) -> None:
        with allowance.for_input(data):
            for decoder in decoders:
                try:
                    bootstrap.decode_json(decoder, data)
                except msgspec.DecodeError:
                    continue
            for handle in handlers:
                assert handle(Asked(data, "127.0.0.1", "Bearer x")).status in (200, 400, 422)

    proof = b'{"kind":"process_exited","pid":7,"seen_by":"kubelet"}'
    bodies = [b"{}", b'{"incarnation":"%s","proofs":[%s]}' % (A.encode(), proof)]
    return fuzz, [*bodies, b'{"protocol":[1,1],"ranks":[]}', b'{"lease_s":5.0}', b'{"error":"no","missing":[1]}']


class _Open:
    """A gate that admits every request: the code behind it is to be fuzzed."""

    def admit(self, authorization: str, operation: str) -> str:
        del authorization, operation
        return "fuzzer"


class _Connector:
    """Takes what the admin endpoint orders."""

    def fence(self, incarnation: str, *proofs: object) -> None:
        """Nothing to fence."""
