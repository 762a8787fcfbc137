"""How a process tells who and where it is."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator

import msgspec
import pytest
from pdpool_connector.layout.process import ProcessName, is_gone, open_process, started_at, this_process


def test_a_container_that_was_started_again_has_another_name():
    here = this_process("pod")
    assert here.container == this_process().container != ""
    again = msgspec.structs.replace(here, container_started=(here.container_started or 0) + 1)
    assert again.container != here.container


def test_where_process_1_is_hidden_the_container_has_no_name():
    assert msgspec.structs.replace(this_process(), container_started=None).container == ""


def test_loopback_leads_to_a_process_of_the_same_network_namespace_alone():
    here = msgspec.structs.replace(this_process(), addresses=("127.0.0.1", "10.0.0.7", "::1"))
    elsewhere = msgspec.structs.replace(here, network_namespace="net:[1]")
    assert here.addresses_seen_by(here) == {"127.0.0.1", "10.0.0.7", "::1"}
    assert here.addresses_seen_by(elsewhere) == {"10.0.0.7"}


def test_what_older_peers_do_not_tell_is_unknown():
    old = msgspec.msgpack.encode({"pid": 1, "started": 2, "boot_id": "b", "pid_namespace": "p"})
    name = msgspec.msgpack.decode(old, type=ProcessName)
    assert (name.container, name.addresses, name.pod_uid) == ("", (), "")


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ValueError, match="does not appear to be"):
        msgspec.structs.replace(this_process(), addresses=("nonsense",))


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_is_not_watched_where_no_descriptor_is_left_and_nothing_fails_by_it():
    here = this_process()
    with no_descriptor_left():
        assert open_process(here) is None


def test_a_process_that_has_ended_is_gone():
    child = subprocess.Popen(["sleep", "60"])
    name = msgspec.structs.replace(this_process(), pid=child.pid, started=started_at(child.pid))
    assert not is_gone(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(name), "though nobody has asked for its status"
    child.wait(10)
    assert is_gone(name)


def test_another_process_with_the_same_number_is_not_taken_for_it():
    us = this_process()
    assert not is_gone(us)
    assert is_gone(msgspec.structs.replace(us, started=us.started - 1))


def test_a_process_of_another_host_is_never_called_gone():
    assert not is_gone(msgspec.structs.replace(this_process(), boot_id="another", pid=1 << 22))
