"""Engines started as the operator and the demo start them leave a record of a hand-off that failed, and it replays."""

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from pdpool_connector.cli import main
from pdpool_connector.flight.record import SUFFIX, decode_record
from pdpool_operator.api import names
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_reference.demo.launch import Children

from tests.integration.asking import get_json, web
from tests.unit.operator.plan.makers import SETTINGS, make_pool
from tests.waiting import until

ROOMS = itertools.count(1_000_000)
WITHIN_S = 60.0


def operators_flag(role, root):
    """The flag that the operator gives an engine of this role, below `root` instead of in a pod."""
    pod = instance_stateful_set(make_pool(role), 0, SETTINGS)["spec"]["template"]["spec"]
    (flag,) = (arg for arg in pod["containers"][0]["args"] if arg.startswith("--flight-dir="))
    name, _, directory = flag.partition("=")
    return [f"{name}={root / role}{directory}"], root / role / directory.lstrip("/")


def records_in(directory):
    return sorted(directory.glob(f"*{SUFFIX}"))


def replay(path):
    result = CliRunner().invoke(main, ["connector", "replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "replay ok: " in result.output
    assert "differences=0" in result.output


@pytest.mark.parametrize("started_by", ["operator", "demo"])
def test_record_of_killed_decode_replays(tmp_path, started_by):
    with Children() as children, ThreadPoolExecutor(2) as pool:
        flags, directory = operators_flag(names.Role.PREFILL, tmp_path)
        if started_by == "demo":
            flags, directory = [], children.flights
        options = ("--enable-faults", "--kv-pages", "512")
        prefill = children.begin_engine("prefill", model_path="tiny", extra=[*options, *flags])
        decode = children.begin_engine("decode", model_path="tiny", extra=options)
        for child in (prefill, decode):
            children.listening(child)
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.addresses["bootstrap_port"]}
        prompt = list(range(100, 164))
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}, **place}

        def ask(child, room):
            return web.post(child.url + "/generate", json={**body, "bootstrap_room": room}, timeout=120)

        number = next(ROOMS)
        good = [pool.submit(ask, child, number) for child in (prefill, decode)]
        assert [answer.result().status_code for answer in good] == [200, 200]
        assert records_in(directory) == [], "what goes well leaves nothing"
        state = f"http://{prefill.addresses['admin']}/v1/state"

        def attempts():
            return [peer["attempts"] for peer in get_json(state)["peers"]]

        until(lambda: attempts() == [0])
        web.post(prefill.url + "/faults", json={"freeze_scheduler": True}, timeout=30)
        number = next(ROOMS)
        doomed = [pool.submit(ask, child, number) for child in (decode, prefill)]
        until(lambda: attempts() == [1])
        decode.process.send_signal(signal.SIGKILL)
        assert doomed[0].exception(WITHIN_S)
        until(lambda: attempts() != [1])
        web.post(prefill.url + "/faults", json={"freeze_scheduler": False}, timeout=30)
        assert doomed[1].result(WITHIN_S).status_code == 502
        (path,) = until(lambda: records_in(directory))
        header = decode_record(path.read_bytes()).header
        assert (header.role, header.room) == ("prefill", number)
        assert header.cause == "peer_lost"
        replay(path)
        text = path.read_text()
        assert str(prompt)[1:20] not in text.replace(",", ", "), "a record has nothing of a prompt"
        assert path.stat().st_mode & 0o077 == 0
