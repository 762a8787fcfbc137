"""An engine that keeps a request whose hand-off has ended shows it, and its connector does not count it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from pdpool_reference.demo.launch import Children

from tests.integration.asking import get_json, web
from tests.integration.test_engine_match import warm_up
from tests.waiting import until


@pytest.mark.parametrize(("side", "queue"), [("prefill", "prefill_inflight"), ("decode", "decode_transfer")])
def test_leaked_request_is_shown_and_has_no_handoff(side, queue):
    with Children() as children, ThreadPoolExecutor(2) as pool:
        engines = {
            role: children.engine(role, model_path="tiny", extra=["--enable-faults"]) for role in ("prefill", "decode")
        }
        leaky = engines[side]
        faults = leaky.url + "/faults"

        def reqs(view):
            return get_json(f"http://{leaky.addresses['admin']}/v1/state")[view][queue]["reqs"]

        warm_up(*engines.values(), pool)
        assert web.post(faults, json={"leak_request": True}, timeout=30).status_code == 200
        warm_up(*engines.values(), pool)
        until(lambda: (reqs("engine_queues"), reqs("queues")) == (1, 0))
        warm_up(*engines.values(), pool)
        until(lambda: (reqs("engine_queues"), reqs("queues")) == (1, 0))
        assert web.post(faults, json={"leak_request": False}, timeout=30).status_code == 200
        until(lambda: reqs("engine_queues") == 0)
