"""A decode engine that is given an address at which no process listens."""

import time

from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_reference.demo.launch import Children, free_port

from tests.integration.asking import web

SLACK_S = 1.0


def test_refused_connections_end_the_request_within_two_seconds():
    with Children() as children:
        decode = children.engine("decode", model_path="tiny")
        port = free_port()
        body = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
        body |= {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
        begun = time.monotonic()
        response = web.post(decode.url + "/generate", json=body, timeout=60)
        refused_s = Timeouts().refused_s
        assert refused_s <= time.monotonic() - begun < refused_s + SLACK_S
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (502, "peer_lost")
        assert f"127.0.0.1:{port}" in error["message"]
