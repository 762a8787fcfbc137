"""H37: names of which one is the beginning of another, where they are matched: rooms and request ids."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pdpool_connector.transport.tokens import sign_operation
from pdpool_reference.demo.launch import Child, Children

from proof.hazards.engines import ANSWER_S, NEW_TOKENS, freeze, generate, soon
from proof.hazards.stage import Stage, hazard
from tests.integration.asking import load_of, web

SIGNER = Ed25519PrivateKey.generate()
PRIVATE = SIGNER.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
PUBLIC = SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@hazard(37, "an abort hits every request whose id begins like it")
def abort_by_prefix(stage: Stage) -> str:
    prefill, decode = (stage.extra(role, operator_key=PUBLIC) for role in ("prefill", "decode"))
    prefill.pages[:] = stage.prefill.pages
    rooms = [_by_room(stage, prefill, decode, at) for at in (prefill, decode)]
    rids = _by_rid(stage)
    return (
        f"POST /v1/abort of rooms {rooms[0]} at prefill and {rooms[1]} at decode left those with 0, 01 behind alone; "
        f"/abort_request of {rids[0]} at a decode engine and {rids[1]} at a prefill engine left the others alone, too: "
        f"{NEW_TOKENS} tokens each"
    )


# --- Rooms, at the connector's admin endpoint ---


def _by_room(stage: Stage, prefill: Any, decode: Any, at: Any) -> int:  # noqa: ANN401 - the tests' driver is not typed
    """Give one of three rooms up at a side; the two others are handed over. The room."""
    room = stage.room()
    rooms = {stage.name(): room * factor + rest for factor, rest in ((1, 0), (10, 0), (100, 1))}
    for index, (name, number) in enumerate(rooms.items()):
        prefill.open(name, number)
        decode.open(name, number, prefill=prefill.bootstrap, pages=[8 + index], aux_slot=index)
        prefill.until(name, "ready")
    named, *others = rooms
    _abort_room(at, room)
    assert at.until(named, "ended")["message"] == "given up by hazards"
    for side in (prefill, decode):
        side.until(named, "releasable")
        for name in others:
            status = side.status(name)
            assert status["cause"] is None, f"room {rooms[name]} ended with room {room}: {status}"
    for index, name in enumerate(others, 1):
        prefill.send(name, [index])
        decode.until(name, "done")
        assert (decode.pages[:, 8 + index] == prefill.pages[:, index]).all(), "the hand-off brought other bytes"
    return room


def _abort_room(side: Any, room: int) -> None:  # noqa: ANN401 - as above
    token = sign_operation(PRIVATE, "pod", "abort", "hazards", f"abort of {room}", time.time())
    body, headers = json.dumps({"room": room}), {"Authorization": token}
    answer = web.post(f"http://{side.admin}/v1/abort", content=body, headers=headers, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text


# --- Request ids, at engines ---


def _by_rid(stage: Stage) -> list[str]:
    """The ids that were aborted at a decode and at a prefill engine, while the other one stood still."""
    with stage.surroundings(), ThreadPoolExecutor(6) as pool, Children() as children:
        begun = [
            children.begin_engine(mode, model_path="tiny", backend=stage.backend, extra=["--enable-faults"])
            for mode in ("prefill", "decode")
        ]
        prefill, decode = [children.listening(engine) for engine in begun]
        return [
            _abort_one_rid(stage, pool, prefill, decode, at=decode),
            _abort_one_rid(stage, pool, prefill, decode, at=prefill),
        ]


def _abort_one_rid(stage: Stage, pool: ThreadPoolExecutor, prefill: Child, decode: Child, *, at: Child) -> str:
    """Abort one of three requests that wait at an engine, by its id, which the other two ids begin with."""
    base = stage.name()
    rids = [base, base + "0", base + "01"]
    still = prefill if at is decode else decode
    freeze(still, frozen=True)
    answers = {rid: _ask(stage, pool, rid, prefill, decode) for rid in rids}
    soon("the engine has all three requests", lambda: _waiting(at) == len(rids))
    answer = web.post(at.url + "/abort_request", json={"rid": base}, timeout=ANSWER_S)
    freeze(still, frozen=False)
    ends = {rid: _end(answers[rid][at.name].result()) for rid in rids}
    assert ends.pop(base) == ("abort", 0), f"{base} was aborted and went on"
    for rid, end in ends.items():
        made = answers[rid][decode.name].result()
        assert end[0] == "length", f"{rid} ended with {base}: {end}"
        assert _end(made) == ("length", NEW_TOKENS), f"the client of {rid} got {made.text}"
    assert answer.json() == {"aborted": 1}, answer.text
    return base


def _ask(
    stage: Stage, pool: ThreadPoolExecutor, rid: str, prefill: Child, decode: Child
) -> dict[str, Future[httpx.Response]]:
    """One request at both engines, as a router posts it; the answers to come by engine."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.addresses["bootstrap_port"]}
    body = {"rid": rid, "bootstrap_room": stage.room(), **where}
    return {engine.name: pool.submit(generate, engine, body) for engine in (prefill, decode)}


def _waiting(engine: Child) -> int:
    queues = load_of(engine.url)["disaggregation"]
    return sum(count for name, count in queues.items() if name != "mode")


def _end(answer: httpx.Response) -> tuple[str, int]:
    """Why a request ended, and how many tokens its client got."""
    body = answer.json()
    if answer.status_code != 200:
        return f"{answer.status_code} {body}", 0
    return body["meta_info"]["finish_reason"]["type"], len(body["output_ids"])
