"""What SIGTERM does to a pair of engines between which a hand-off stands: the reference engine, a connector in each."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pdpool_reference.demo.launch import Child, Children, get_status

from proof.hazards.engines import NEW_TOKENS, SOON_S, freeze, generate, soon
from proof.hazards.stage import Stage
from tests.integration.asking import get_json, load_of


def end_engines(stage: Stage) -> float:
    """Seconds from the signal to the exit of both engines.

    Decode's scheduler is frozen when the signal comes, so that the hand-off is under way. Both engines refuse new work
    and show that, and exit only when the hand-off is over and its client has all tokens.
    """
    with stage.surroundings(), ThreadPoolExecutor(2) as pool, Children() as children:
        pair = [
            children.engine(mode, model_path="tiny", backend=stage.backend, extra=["--enable-faults"])
            for mode in ("prefill", "decode")
        ]
        prefill, decode = pair
        registry = int(prefill.addresses["bootstrap_port"])
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": registry, "bootstrap_room": stage.room()}
        freeze(decode, frozen=True)
        answers = [pool.submit(generate, engine, room) for engine in pair]
        soon("prefill waits for the frozen decode", lambda: _queued(prefill) == 1)
        soon("prefill has decode's half", lambda: _halves(prefill) == 1)
        begun = time.monotonic()
        for engine in pair:
            engine.process.send_signal(signal.SIGTERM)
        for engine in pair:
            soon(f"{engine.name} is not healthy any more", partial(_has_health, engine, 503))
            late = generate(engine, {**room, "bootstrap_room": stage.room()})
            assert late.status_code == 503, f"{engine.name} took new work: {late.status_code} {late.text}"
            assert engine.process.poll() is None, f"{engine.name} left its hand-off"
        freeze(decode, frozen=False)
        for engine, answer in zip(pair, answers, strict=True):
            assert answer.result().status_code == 200, f"{engine.name} dropped the request: {answer.result().text}"
        made = len(answers[1].result().json()["output_ids"])
        assert made == NEW_TOKENS, f"the client got {made} of {NEW_TOKENS} tokens"
        codes = [engine.process.wait(SOON_S) for engine in pair]
        seconds = time.monotonic() - begun
    assert codes == [0, 0], f"the processes ended with {codes}"
    assert not _listening(registry), "the registry of a prefill that has ended still answers"
    return seconds


def _queued(engine: Child) -> int:
    queued: int = load_of(engine.url)["disaggregation"]["prefill_bootstrap_queue_reqs"]
    return queued


def _halves(engine: Child) -> int:
    """How many attempts the decodes have opened at a prefill."""
    peers: list[dict[str, int]] = get_json(f"http://{engine.addresses['admin']}/v1/state")["peers"]
    return sum(peer["attempts"] for peer in peers)


def _has_health(engine: Child, status: int) -> bool:
    return get_status(engine.url + "/health") == status


def _listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
