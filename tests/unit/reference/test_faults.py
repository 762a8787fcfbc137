"""Which frames of the connector a fault lets through."""

import pytest
from pdpool_connector.protocol.frames import Ended, Goodbye, Query
from pdpool_reference.frame_faults import FrameFault, FrameFaults

COMMON = {"version": 1, "sender": "0" * 32}
ATTEMPT = {**COMMON, "attempt": ("0" * 32, 1), "room": 1}
ENDED, QUERY, BYE = Ended(**ATTEMPT, cause="", settled=True), Query(**ATTEMPT), Goodbye(**COMMON, reason="")


def test_without_a_fault_frames_pass_at_once():
    faults = FrameFaults()
    assert [faults(frame) for frame in (ENDED, QUERY, BYE)] == [0.0, 0.0, 0.0]


def test_drop_loses_every_frame():
    faults = FrameFaults()
    faults.fault = FrameFault(drop=True, delay_s=3.0)
    assert [faults(frame) for frame in (ENDED, QUERY, BYE)] == [None, None, None]


def test_delay_holds_every_frame_back():
    faults = FrameFaults()
    faults.fault = FrameFault(delay_s=3.0)
    assert [faults(frame) for frame in (ENDED, QUERY, BYE)] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(("frame", "fate"), [(ENDED, None), (QUERY, 0.0), (BYE, 0.0)])
def test_stopping_status_loses_only_answers(frame, fate):
    faults = FrameFaults()
    faults.fault = FrameFault(drop_status=True)
    assert faults(frame) == fate
