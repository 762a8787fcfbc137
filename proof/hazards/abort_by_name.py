"""H37: request ids of which one is the beginning of another."""

from concurrent.futures import Future, ThreadPoolExecutor

import httpx2 as httpx
from pdpool_reference.demo.launch import Child, Children

from proof.hazards.engines import ANSWER_S, NEW_TOKENS, freeze, generate, soon
from proof.hazards.stage import Stage, hazard
from tests.integration.asking import load_of, web


@hazard(37, "an abort ends every request whose id begins with the given one")
def abort_by_prefix(stage: Stage) -> str:
    rids = _by_rid(stage)
    return (
        f"/abort_request of {rids[0]} at a decode engine and {rids[1]} at a prefill engine left those with 0, 01 "
        f"behind alone: {NEW_TOKENS} tokens each"
    )


def _by_rid(stage: Stage) -> list[str]:
    """The ids that were aborted at a decode and at a prefill engine, while the scheduler of the other was frozen."""
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
    """One request at both engines, as a router posts it; returns the future answers by engine."""
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
