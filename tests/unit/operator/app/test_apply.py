"""Carrying out a plan: its order, which steps a refusal prevents, and which it does not."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller.apply import carry_out
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.plan.model import Adopt, Delete, Patch, Plan, WorkerAction, WorkerChange
from pdpool_operator.runtime.api_errors import ForbiddenError, InvalidError, NameConflictError, UnavailableError


def obj(kind: str, name: str) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "namespace": "llm"}}


class Api:
    def __init__(self, **refusals: Exception) -> None:
        self.done: list[str] = []
        self.refusals = refusals

    async def adopt(self, resource, namespace, name, uid, owner):
        assert (namespace, owner) == ("llm", {"uid": "owner"})
        self.done.append(f"adopt {resource.kind} {name} {uid}")

    async def apply(self, resource, body, *, dry_run=False):
        name = body["metadata"]["name"]
        if name in self.refusals:
            raise self.refusals[name]
        self.done.append(f"{'dry-run' if dry_run else 'apply'} {resource.kind} {name}")
        return body

    async def apply_unread(self, resource, body):
        self.done.append(f"unread {resource.kind} {body['metadata']['name']}")
        return {"stored": True}

    async def merge(self, resource, namespace, name, patch):
        assert (namespace, patch) == ("llm", {})
        self.done.append(f"patch {resource.kind} {name}")

    async def delete(self, resource, namespace, name, uid, grace_period_s=None):
        assert namespace == "llm"
        self.done.append(f"delete {resource.kind} {name} {uid} {grace_period_s}")


class Routers:
    def __init__(self, done: list[str], *, silent: str = "", slow: str = "") -> None:
        """`silent` is the address of a router that does not answer, `slow` of one whose list does not change."""
        self.done, self.silent, self.slow = done, silent, slow

    async def add(self, ip, key, url, role, port):
        assert (role, port) == (Role.DECODE, None)
        return await self._do("add", ip, url, key)

    async def remove(self, ip, key, worker_id):
        return await self._do("remove", ip, worker_id, key)

    async def _do(self, what: str, ip: str, whom: str, key: str) -> bool:
        assert key == "llm/2"
        if ip == self.silent:
            raise Unanswered("timeout")
        self.done.append(f"{what} {ip} {whom}")
        return ip != self.slow


ADD = WorkerChange("r1", "10.1", WorkerAction.ADD, "new", Role.DECODE, key_epoch=2)
REMOVE = WorkerChange("r1", "10.1", WorkerAction.REMOVE, "old", Role.DECODE, key_epoch=2, worker_id="w")
PLAN = Plan(
    adopt=(Adopt("Service", "o", "u0", {"uid": "owner"}),),
    verify=(obj("StatefulSet", "next"),),
    apply=(obj("Service", "s"), obj("StatefulSet", "a"), obj("Secret", "k")),
    patch=(Patch("StatefulSet", "b", {}),),
    delete=(Delete("Pod", "c", "u1", 30),),
    workers=(REMOVE, ADD),
)


async def run(plan: Plan, api: Api, **routers: str):
    return await carry_out(plan, "llm", api, Routers(api.done, **routers), "{}/{}".format)


async def test_a_refused_secret_keeps_back_what_would_say_that_it_is_there():
    class Refusing(Api):
        async def apply_unread(self, resource, body):
            raise NameConflictError(resource.kind, body["metadata"]["name"], "somebody")

    api = Refusing()
    plan = Plan(apply=(obj("Secret", "k"), obj("Service", "s")))
    outcome = await run(plan, api)
    assert [fault.reason for fault in outcome.faults] == [Reason.NAME_CONFLICT]
    assert api.done == []


async def test_everything_is_done_in_the_plans_order():
    api = Api()
    outcome = await run(PLAN, api)
    assert api.done == [
        "adopt Service o u0",
        "dry-run StatefulSet next",
        "apply Service s",
        "apply StatefulSet a",
        "unread Secret k",
        "patch StatefulSet b",
        "delete Pod c u1 30",
        "remove 10.1 w",
        "add 10.1 new",
    ]
    assert outcome.faults == outcome.unsettled == ()


async def test_a_refused_dry_run_stops_all_but_the_rotation():
    api = Api(next=InvalidError(422, "Invalid", "spec.x: bad", "patch"))
    outcome = await run(PLAN, api)
    assert api.done == ["adopt Service o u0", "remove 10.1 w", "add 10.1 new"]
    (fault,) = outcome.faults
    assert fault.reason is Reason.TEMPLATE_INVALID
    assert fault.message == "The API server refuses StatefulSet next: spec.x: bad"


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("a", InvalidError(422, "Invalid", "bad", ""), Reason.TEMPLATE_INVALID),
        ("s", InvalidError(422, "Invalid", "bad", ""), Reason.APPLY_FAILED),
        ("s", ForbiddenError(403, "Forbidden", "exceeded quota", ""), Reason.APPLY_FAILED),
        ("s", NameConflictError("Service", "s", "nobody"), Reason.NAME_CONFLICT),
    ],
)
async def test_a_refused_object_keeps_others_applied_and_nothing_deleted(name, error, reason):
    api = Api(**{name: error})
    outcome = await run(PLAN, api)
    assert [fault.reason for fault in outcome.faults] == [reason]
    assert "unread Secret k" in api.done
    assert not any(done.startswith(("patch", "delete")) for done in api.done)


@pytest.mark.parametrize("refused", ["next", "a"])
async def test_what_was_taken_out_of_service_is_put_back_when_something_is_refused_and_only_then(refused):
    plan = replace(PLAN, put_back=(Patch("StatefulSet", "drained", {}),))
    api = Api(**{refused: ForbiddenError(403, "Forbidden", "exceeded quota", "")})
    await run(plan, api)
    assert [done for done in api.done if done.startswith(("patch", "delete"))] == ["patch StatefulSet drained"]
    well = Api()
    await run(plan, well)
    assert "patch StatefulSet drained" not in well.done


@pytest.mark.parametrize("step", ["next", "s", "a"])
async def test_a_failed_call_is_raised_after_the_rotation(step: str):
    api = Api(**{step: UnavailableError(503, "", "busy", "")})
    with pytest.raises(UnavailableError):
        await run(PLAN, api)
    assert api.done[-2:] == ["remove 10.1 w", "add 10.1 new"]
    assert not [action for action in api.done if action.startswith("delete")]


async def test_a_router_that_is_silent_or_slow_is_told_and_holds_up_no_other():
    api = Api()
    other = replace(ADD, router="r2", router_ip="10.2")
    outcome = await run(Plan(workers=(ADD, other)), api, silent="10.1")
    assert api.done == ["add 10.2 new"]
    assert outcome.unsettled == ("r1: add decode new: timeout",)
    outcome = await run(Plan(workers=(ADD, other)), api, slow="10.2")
    assert outcome.unsettled == ("r2: add decode new: does not show yet",)


LAST = replace(REMOVE, worker_id="last")


async def test_removals_that_come_after_an_addition_wait_until_it_shows():
    api = Api()
    plan = Plan(workers=(REMOVE, ADD, LAST))
    assert (await run(plan, api)).unsettled == ()
    assert api.done == ["remove 10.1 w", "add 10.1 new", "remove 10.1 last"]
    waiting = Api()
    outcome = await run(Plan(workers=(ADD, LAST)), waiting, slow="10.1")
    assert waiting.done == ["add 10.1 new"]
    assert outcome.unsettled == ("r1: add decode new: does not show yet",)


async def test_accepted_changes_are_known_whatever_other_routers_do():
    api = Api()
    slow, silent = (replace(ADD, router=name, router_ip=ip) for name, ip in (("r2", "10.2"), ("r3", "10.3")))
    outcome = await run(Plan(workers=(REMOVE, slow, silent)), api, slow="10.2", silent="10.3")
    assert outcome.workers == (REMOVE, slow)
    assert len(outcome.unsettled) == 2
