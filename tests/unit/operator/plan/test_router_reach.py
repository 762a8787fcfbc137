"""Which routers the Service of a router lists."""

import itertools
from dataclasses import replace

import pytest
from pdpool_operator.api.names import LABEL_REACHABLE
from pdpool_operator.observe.model import ObservedRouter
from pdpool_operator.plan.router_reach import label_routers

from tests.unit.operator.plan.makers import make_pod

STATES = [
    ObservedRouter(replace(make_pod("r"), ready=ready, terminating=terminating, labelled_reachable=label), None, "", at)
    for ready, terminating, label, at in itertools.product(
        (True, False), (True, False), ("true", "false", ""), (True, False, None)
    )
]


def routers(*states: ObservedRouter) -> list[ObservedRouter]:
    return [replace(state, pod=replace(state.pod, name=f"r{n}", uid=f"u{n}")) for n, state in enumerate(states)]


def router(label: str = "true", *, reachable: bool | None = True, ready: bool = True) -> ObservedRouter:
    return ObservedRouter(replace(make_pod("r"), ready=ready, labelled_reachable=label), None, "", reachable)


def labels_after(*states: ObservedRouter) -> list[str]:
    """Return the labels once the patches are carried out."""
    given = routers(*states)
    patched = {patch.name: patch.body["metadata"]["labels"][LABEL_REACHABLE] for patch in label_routers(given)[0]}
    return [patched.get(one.pod.name, one.pod.labelled_reachable) for one in given]


def test_an_unreachable_router_leaves_the_service_while_another_serves() -> None:
    patches, events = label_routers(routers(router(), router(reachable=False)))
    assert [(patch.name, patch.body["metadata"]["uid"]) for patch in patches] == [("r1", "u1")]
    assert [(event.reason, event.message) for event in events] == [
        ("RouterRemoved", "Connections to r1 fail: its Service lists it no longer")
    ]


def test_a_router_that_is_reachable_again_comes_back() -> None:
    patches, events = label_routers(routers(router(), router("false")))
    assert [patch.body["metadata"]["labels"] for patch in patches] == [{LABEL_REACHABLE: "true"}]
    assert [event.reason for event in events] == ["RouterAdded"]


@pytest.mark.parametrize(
    "other",
    [
        router(reachable=False),
        router(reachable=None),
        router(ready=False),
        router("false"),
        replace(router(), pod=replace(router().pod, terminating=True)),
    ],
)
def test_a_router_stays_if_no_other_is_known_to_serve(other: ObservedRouter) -> None:
    assert labels_after(router(reachable=False), other)[0] == "true"


def test_what_is_not_known_changes_no_label() -> None:
    assert labels_after(router(), router("false", reachable=None)) == ["true", "false"]


def test_a_lost_label_is_put_back_without_an_event() -> None:
    assert label_routers(routers(router("")))[1] == ()
    assert labels_after(router(""), router("", reachable=None)) == ["true", "true"]


def test_no_plan_takes_the_last_serving_router_out() -> None:
    def serving(states: list[ObservedRouter], labels: list[str]) -> bool:
        pairs = zip(states, labels, strict=True)
        return any(s.pod.ready and not s.pod.terminating and label == "true" for s, label in pairs)

    for pair in itertools.product(STATES, STATES):
        given = routers(*pair)
        if serving(given, [one.pod.labelled_reachable for one in given]):
            assert serving(given, labels_after(*pair)), pair
