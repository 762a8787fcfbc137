"""Which trials are made on which machine, what the page says, and that a trial can fail."""

import signal

import pytest
from pdpool_connector.hwcheck import trials
from pdpool_connector.hwcheck.machine import Machine, RdmaPort
from pdpool_connector.hwcheck.page import render, summary
from pdpool_connector.hwcheck.trials import Outcome, Trial, TrialError, plan, run

BARE = Machine(gpus=(), rdma=(), verbs_devices=(), memlock_bytes=None, shm_bytes=1 << 30)
PORT = RdmaPort("mlx5_0", 1, True, "InfiniBand", ((0, "fe80::1", ""),))
FULL = Machine(("NVIDIA H100",), (PORT,), ("uverbs0",), None, 1 << 30)
ALL = {"nixl": "", "mooncake": ""}


def skips(machine: Machine, devices: int = 0, **backends: str) -> dict[str, str]:
    found = plan(machine, {**ALL, **backends}, devices, "" if devices else "no GPU")
    return {trial.name: trial.skip for trial in found}


def test_bare_machine_tries_host_memory_only():
    tried = [name for name, why in skips(BARE).items() if not why]
    assert tried == [
        "host to host, shared memory of the local backend",
        "host to host, NIXL, CMA",
        "host to host, NIXL, TCP",
        "host to host, Mooncake, TCP",
    ]


def test_full_machine_skips_nothing():
    assert not any(skips(FULL, devices=2).values())


def test_missing_backend_skips_its_trials_only():
    found = skips(FULL, devices=1, nixl="NIXL cannot be imported")
    assert {why for name, why in found.items() if "NIXL" in name} == {"NIXL cannot be imported"}
    assert not any(why for name, why in found.items() if "NIXL" not in name)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verbs_devices": ()}, "no /dev/infiniband/uverbs*"),
        ({"rdma": (RdmaPort("mlx5_0", 1, False, "InfiniBand", ()),)}, "no port of an RDMA device is active"),
        ({"memlock_bytes": 65536}, "RLIMIT_MEMLOCK is 65536 bytes"),
    ],
)
def test_rdma_that_cannot_work_says_why(changes, why):
    fields = {name: getattr(FULL, name) for name in FULL.__dataclass_fields__}
    assert skips(Machine(**{**fields, **changes}), devices=1)["host to host, NIXL, RDMA"].startswith(why)


@pytest.mark.parametrize("devices", [0, 1])
def test_beside_a_gpu_ucx_may_look_at_its_memory_in_every_trial(devices):
    host = [trial for trial in plan(FULL, ALL, devices, "") if "host to host, NIXL" in trial.name]
    assert len(host) == 3
    assert all(("cuda_copy" in trial.environment["UCX_TLS"]) is bool(devices) for trial in host)


def test_device_trial_uses_two_devices():
    chosen = {trial.name: (trial.source, trial.target) for trial in plan(FULL, ALL, 2, "")}
    assert chosen["device to device, NIXL, RDMA"] == (0, 1)
    assert chosen["device to host, NIXL, RDMA"] == (0, None)


def test_page_counts_and_explains():
    proved = Outcome(Trial("a", "nixl"), {"bytes are equal": ""}, "cma")
    failed = Outcome(Trial("b", "nixl"), {"bytes are equal": "pages [3] differ"})
    skipped = Outcome(Trial("c", "nixl", skip="no GPU"))
    page = render(BARE, [proved, failed, skipped], "0.1.0")
    assert "| a | proved | cma | bytes are equal |" in page
    assert "| b | failed |  | bytes are equal: pages [3] differ |" in page
    assert "| c | skipped |  | no GPU |" in page
    assert summary([proved, failed, skipped]) == "hwcheck failed: proved=1 skipped=1 failed=1"


def test_local_trial_is_proved():
    outcome = run(Trial("local", "local"), lambda _: None)
    assert (outcome.word, dict(outcome.checks)) == (
        "proved",
        dict.fromkeys(("bytes are equal", "abort leaves no stale byte", "kill releases the pages"), ""),
    )


def test_unknown_backend_fails_the_trial():
    outcome = run(Trial("none", "carrier pigeon"), lambda _: None)
    assert outcome.word == "failed"
    assert "carrier pigeon" in outcome.checks["start"]


def test_wrong_bytes_fail_the_trial(monkeypatch):
    """The sides compare with what room 1 holds; here decode is asked after another room."""
    call = trials.Child.call

    def asked(self, do, **arguments):
        return call(self, do, **({**arguments, "room": 9} if do == "differing" else arguments))

    monkeypatch.setattr(trials.Child, "call", asked)
    assert "differ from what was sent" in run(Trial("local", "local"), lambda _: None).checks["bytes are equal"]


def test_dead_side_is_named():
    with trials.Child("prefill", Trial("local", "local"), None) as child:
        child.ready()
        child.signal(signal.SIGKILL)
        with pytest.raises(TrialError, match="prefill ended with -9"):
            child.call("address")
