"""The local cluster with the chart installed, for as long as a session of drills or faults runs."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from dev.cluster import bringup
from dev.cluster.layout import State, state_at
from dev.shell import Clock
from proof.cluster.stage import thaw
from tests.cluster.stack import Stack
from tests.cluster.stack_setup import installed


@contextlib.contextmanager
def session(
    clock: Clock, *namespaces: str, more_images: tuple[str, ...] = (), values: Mapping[str, Any] | None = None
) -> Iterator[tuple[Stack, State]]:
    """Install the chart on the running local cluster, and remove it at the end.

    Args:
        clock: Shows progress.
        namespaces: Further namespaces to create and to remove.
        more_images: Images beside those of the product.
        values: Values of the chart.

    Raises:
        RuntimeError: the local cluster is not ready.
    """
    state = state_at(None)
    thaw(state)
    status = bringup.status(state)
    if status is None or not status["ready"]:
        raise RuntimeError(f"the local cluster is not ready: {status and status['reason']}; run `make cluster`")
    os.environ["KUBECONFIG"] = str(state.kubeconfig)
    with installed(state, status, clock.say, *namespaces, more_images=more_images, **values or {}) as stack:
        try:
            yield stack, state
        finally:
            thaw(state)


def exit_on_sigterm() -> None:
    """End as after an error when SIGTERM arrives, so that all is undone."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)
