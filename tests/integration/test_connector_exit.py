"""An engine that fails leaves by its exception, even while its connector is busy."""

import os
import subprocess
import sys

import pytest

from tests.integration.forked import OWN_CODE, ROOT

TRIES = {"nixl": 3, "mooncake": 1, "local": 1}
"""Without an end of its own, about every second prefill over NIXL is aborted."""


def engine(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.raising_engine", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **OWN_CODE, "UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo"},
    )


@pytest.mark.parametrize("backend", TRIES)
def test_engines_failing_together_end_by_their_exception(backend: str) -> None:
    for _ in range(TRIES[backend]):
        with (
            engine("prefill", backend) as prefill,
            engine("decode", backend, prefill.stdout.readline().strip()) as decode,
        ):
            decode.stdout.readline()
            assert decode.stdout.readline() == "busy\n"
            for side in (prefill, decode):
                side.stdin.write("fail\n")
                side.stdin.flush()
            for side in (prefill, decode):
                _, said = side.communicate(timeout=60)
                assert side.returncode == 1, said[-2000:]
                assert "RuntimeError: the engine fails" in said
