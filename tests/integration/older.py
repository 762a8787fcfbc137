"""Lets the connector of this process speak as a release did that knew an older version, and notes what it says.

HelloQueue, and what the registry tells, have the fields that those of the code that spoke version 3 had.
Only for a process that ends with the test: what is changed here stays changed.
"""

import json
from collections import Counter

import msgspec
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol import versions
from pdpool_connector.transport import control
from pdpool_connector.transport.bootstrap import BootstrapClient, BootstrapInfo
from pdpool_connector.transport.registry import RegistryEndpoint

SINCE: dict[type, int] = {f.Batch: f.BATCH_VERSION, f.Expect: f.EXPECT_VERSION}
SHARES = ("state_cuts", "state_rank", "state_ranks")
"""What memories and parts tell since `SHARES_SINCE`."""
HELLO_FIELDS = 7
"""Length of a Hello before that."""


def speak(version: int, said: Counter[str]) -> None:
    """Know nothing newer than `version`; count in `said` what goes out: "Open 3" are those of version 3."""
    if version < f.VERSION_MAX:
        f.VERSION_MAX = versions.VERSION_MAX = version
        _be_deaf_to_newer(version)
    if version < versions.SHARES_SINCE:
        control.encode = _encode_without_shares
        _tell_registry_without_shares()
        _read_registry_without_shares()
    _note(said)


def _note(said: Counter[str]) -> None:
    encode = control.encode

    def noted(frame: f.Frame) -> bytes:
        for one in (frame, *frame.frames) if isinstance(frame, f.Batch) else (frame,):
            said[f"{type(one).__name__} {one.version}"] += 1
        return encode(frame)

    control.encode = noted


def _be_deaf_to_newer(version: int) -> None:
    def decode(data: bytes) -> f.AnyFrame:
        frame = f.decode(data)
        if SINCE.get(type(frame), f.VERSION_MIN) > version:
            raise f.MalformedFrameError("malformed", f"{type(frame).__name__} is not known in version {version}")
        return frame

    control.decode = decode


def _encode_without_shares(frame: f.Frame) -> bytes:
    if isinstance(frame, f.Hello | f.HelloOk):
        told = msgspec.msgpack.decode(frame.memory)
        memory = msgspec.msgpack.encode(told | {"memory": _without_shares(told["memory"])})
        frame = msgspec.structs.replace(frame, memory=memory)
    data = f.encode(frame)
    return msgspec.msgpack.encode(msgspec.msgpack.decode(data)[:HELLO_FIELDS]) if isinstance(frame, f.Hello) else data


def _tell_registry_without_shares() -> None:
    get = RegistryEndpoint._get

    def tell(endpoint, asked):
        reply = get(endpoint, asked)
        return reply._replace(body=json.dumps(_ranks_without_shares(json.loads(reply.body))).encode())

    RegistryEndpoint._get = tell


def _read_registry_without_shares() -> None:
    ask = BootstrapClient.ask

    async def read(*args):
        told = json.loads(msgspec.json.encode(await ask(*args)))
        return msgspec.convert(_ranks_without_shares(told), BootstrapInfo)

    BootstrapClient.ask = read


def _ranks_without_shares(told: dict) -> dict:
    """What a registry says, which may be that ranks are missing."""
    ranks = [rank | {"part": _without_shares(rank["part"])} for rank in told.get("ranks", ())]
    return told | {"ranks": ranks} if ranks else told


def _without_shares(fields: dict) -> dict:
    return {field: value for field, value in fields.items() if field not in SHARES}
