"""The whole stack for as long as a block runs: images, CRDs, the chart's release, empty namespaces for pools."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import Any

from pdpool_reference.demo.launch import Children

from dev.cluster.layout import State
from dev.images.build import PRODUCT_IMAGES, build
from dev.images.load import load
from dev.shell import Clock
from tests.cluster.leftovers import make_room, remove
from tests.cluster.stack import CRDS, POOLS, SYSTEM, Object, Stack, namespace
from tests.cluster.stack_traffic import PROMPTS, generate
from tests.cluster.turn import turn

Answers = dict[tuple[int, ...], tuple[int, ...]]


@contextlib.contextmanager
def installed(
    state: State,
    status: Object,
    say: Callable[[str], None],
    *namespaces: str,
    more_images: tuple[str, ...] = (),
    **values: Any,
) -> Iterator[Stack]:
    """Install the chart freshly, and remove it at the end. No other user has the cluster meanwhile.

    Args:
        state: Files of the local cluster.
        status: Result of `python -m dev.cluster status --json`.
        say: Shows one line.
        namespaces: Further namespaces to create and to remove.
        more_images: Images beside those of the product.
        values: Values of the chart.
    """
    stack = Stack(status)
    # Its operator serves all namespaces, and would write on other tests' objects.
    with turn(fcntl.LOCK_EX):
        make_room(stack, say)
        clock = Clock("images")
        for name in PRODUCT_IMAGES + more_images:
            build(name, clock)
            load(name, state, clock)
        try:
            stack.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=120s", timeout_s=130)
            stack.apply(*(namespace(name) for name in (SYSTEM, POOLS, *namespaces)))
            stack.install(**values)
            yield stack
        finally:
            remove(stack)


def right_answers() -> Answers:
    """Return the answers of one engine that does both phases, for the prompts of the traffic."""
    with Children() as children:
        url = children.engine("unified", model_path="tiny").url
        return {prompt: generate(url, prompt) for prompt in PROMPTS}
