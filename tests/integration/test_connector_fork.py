"""A helper that an engine forks shares its sockets and epolls; however it ends, the engine's connector works on."""

import os
import subprocess
import sys

import pytest

from tests.integration.forked import OWN_CODE, ROOT
from tests.integration.forking_engine import HAND_OFFS, HELPER_ENDED


def engine(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.forking_engine", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **OWN_CODE, "UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo"},
    )


@pytest.mark.parametrize("backend", ["nixl", "mooncake", "local"])
def test_forked_helpers_leave_the_connector_alone(backend: str) -> None:
    with engine("prefill", backend) as prefill:
        for line in iter(prefill.stdout.readline, ""):
            if ":" in line:
                break
        with engine("decode", backend, line.strip()) as decode:
            try:
                said = [(*side.communicate(timeout=180), side.returncode) for side in (decode, prefill)]
            finally:
                decode.kill()
                prefill.kill()
    (decode_says, decode_log, decode_code), (prefill_says, prefill_log, prefill_code) = said
    helper = f"helper {HELPER_ENDED}"
    after_start = ["done", helper, *["done"] * (HAND_OFFS - 1)]
    assert decode_says.splitlines() == [helper, "ready", *after_start], decode_log[-2000:]
    assert prefill_says.splitlines() == after_start, prefill_log[-2000:]
    assert (decode_code, prefill_code) == (0, 0), decode_log[-2000:] + prefill_log[-2000:]
