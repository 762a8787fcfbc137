"""What scenarios ask of reference engines: a request, a frozen scheduler, a condition that holds soon."""

from collections.abc import Callable
from typing import Final

import httpx2 as httpx
from pdpool_reference.demo.launch import Child

from dev.shell import wait_for
from tests.integration.asking import web

NEW_TOKENS: Final = 12
ANSWER_S: Final = 60.0
SOON_S: Final = 30.0


def generate(engine: Child, fields: dict[str, object]) -> httpx.Response:
    """One request of `NEW_TOKENS` tokens; `fields` are its room and its other fields."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(range(1, 65)), "sampling_params": sampling, **fields}
    answer: httpx.Response = web.post(engine.url + "/generate", json=body, timeout=ANSWER_S)
    return answer


def freeze(engine: Child, *, frozen: bool) -> None:
    """Freeze an engine's scheduler, or let it go on; the engine was started with --enable-faults."""
    answer = web.post(engine.url + "/faults", json={"freeze_scheduler": frozen}, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text


def soon(what: str, holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    wait_for(what, lambda: None if holds() else "not yet", deadline_s=SOON_S, interval_s=0.02)
