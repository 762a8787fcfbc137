"""Waits between polls."""

import ctypes
import threading

import pytest
from pdpool_connector.backends.polling import pause, sharpen_sleeps

PR_GET_TIMERSLACK = 30  # linux/prctl.h


def test_a_wait_starts_short_and_never_sleeps_long():
    assert pause(0.0, 0.0) == 0.0
    assert pause(50e-6, 15e-6) == 15e-6
    assert pause(800e-6, 15e-6) == pytest.approx(100e-6)
    assert pause(10.0, 15e-6) == 0.002


def test_a_second_of_waiting_costs_few_polls():
    steps, waited = 0, 0.0
    while waited < 1.0:
        waited += pause(waited, 15e-6)
        steps += 1
    assert steps < 600


def test_sharp_sleeps_are_a_matter_of_the_calling_thread_alone():
    slack = []

    def worker():
        sharpen_sleeps()
        slack.append(_slack())

    before = _slack()
    thread = threading.Thread(target=worker)
    thread.start()
    thread.join(10)
    assert slack == [1000]
    assert _slack() == before


def _slack():
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
