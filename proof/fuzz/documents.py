"""Signed and stored documents: tokens of the admin endpoint and of ranks, and records of the flight recorder."""

import contextlib
import itertools
from collections.abc import Sequence

import jwt
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pdpool_connector.flight.record import Header, Record, RecordError, Step, decode_record, encode_record
from pdpool_connector.flight.replay import replay
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Event,
    Linked,
    OfferPages,
    OpenAttempt,
    PeerReady,
    Received,
    Writer,
)
from pdpool_connector.protocol.frames import VERSION_MAX, AttemptFrame
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.tokens import (
    RegistrationVerifier,
    TokenError,
    TokenVerifier,
    sign_operation,
    sign_registration,
)

from proof.fuzz.allowance import Allowance
from proof.fuzz.samples import A, B, Fuzzed, sample_frames

NOW = 1_700_000_000.0
POD = "pod-7"
OPERATION = "fence"
MOST_STEPS = 64


def tokens() -> tuple[Fuzzed, Sequence[bytes]]:
    """Raw headers, and, behind an odd first byte, any claims that the right key has signed."""
    allowance = Allowance()
    private = Ed25519PrivateKey.from_private_bytes(bytes(32))
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    clock = itertools.count(int(NOW))
    gate = TokenVerifier(public.decode(), POD, clock=lambda: float(next(clock)))
    key = CurveKey(b"p" * 40, b"s" * 40)
    signer = jwt.PyJWS()

    def fuzz(data: bytes) -> None:
        signed = bool(data) and data[0] % 2 == 1
        header = data[1:].decode("latin-1")
        if signed:
            header = f"Bearer {signer.encode(data[1:], private, algorithm='EdDSA')}"
        with allowance.for_input(data):
            try:
                who = gate.admit(header, OPERATION)
            except TokenError:
                pass
            else:
                said = jwt.decode(header.removeprefix("Bearer "), options={"verify_signature": False})
                assert said["op"] == OPERATION, f"{who} was let in by {data!r}"
                assert POD in said["aud"], f"{who} was let in by {data!r}"
            with contextlib.suppress(TokenError):
                RegistrationVerifier([key], lambda: NOW).check(header, b"{}")

    claims = {"aud": POD, "op": OPERATION, "sub": "operator", "jti": "1", "iat": int(NOW), "exp": int(NOW) + 60}
    honest = sign_operation(pem, POD, OPERATION, "operator", "2", NOW).encode()
    return fuzz, [
        b"\0" + honest,
        b"\0" + sign_registration(key, b"{}", "3", NOW).encode(),
        b"\1" + msgspec.json.encode(claims),
        b"\1" + msgspec.json.encode({**claims, "aud": [POD, "pod-8"], "exp": 1e300}),
    ]


def flight() -> tuple[Fuzzed, Sequence[bytes]]:
    """A record that is read back, written again and replayed."""
    allowance = Allowance()

    def fuzz(data: bytes) -> None:
        with allowance.for_input(data):
            try:
                record = decode_record(data)
            except RecordError:
                return
        assert decode_record(encode_record(record)) == record
        if len(record.steps) <= MOST_STEPS:
            try:
                replay(record)
            except RecordError:
                return

    frames = [frame for frame in sample_frames() if isinstance(frame, AttemptFrame)]
    return fuzz, [encode_record(_record(frame)) for frame in frames]


def _record(frame: AttemptFrame) -> Record:
    """An attempt that decode gives up; short, because the fuzzer's inputs are."""
    machine = DecodeMachine(A, Timeouts())
    events: list[Event] = [
        OpenAttempt(1, "p:1", 7, "r", 30.0),
        PeerReady(B, VERSION_MAX),
        Linked("p:1", (Writer(B),)),
        OfferPages(1, bytes(16), 0, 3),
        Received(msgspec.structs.replace(frame, sender=B)),
        AbortTransfer(1, "given up"),
    ]
    steps = [Step(float(at), event, machine.handle(event, float(at))) for at, event in enumerate(events)]
    header = Header(
        role="decode",
        rank=0,
        incarnation=A,
        room=7,
        request_id="r",
        handle=1,
        cause="aborted",
        message="given up",
        releasable=True,
        missing=0,
        wall=NOW,
        at=1.0,
        timeouts=Timeouts(),
    )
    return Record(header, tuple(steps))
