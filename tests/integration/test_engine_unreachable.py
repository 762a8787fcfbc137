"""A decode engine that is given an address at which nobody listens."""

import time

from pdpool_connector.runtime.instance_connection import REFUSED_S
from pdpool_reference.demo.launch import Children, free_port

from tests.integration.asking import web


def test_a_request_whose_prefill_is_not_there_ends_when_that_is_certain_and_names_the_address():
    with Children() as children:
        decode = children.engine("decode", model_path="tiny")
        port = free_port()
        body = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
        body |= {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
        begun = time.monotonic()
        response = web.post(decode.url + "/generate", json=body, timeout=60)
        assert time.monotonic() - begun >= REFUSED_S
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (502, "peer_lost")
        assert f"bootstrap 127.0.0.1:{port} cannot be reached" in error["message"]
        assert "nobody has listened there for 5 s" in error["message"]
