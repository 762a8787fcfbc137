"""Pools get keys for their control channel while they run. In every order, all running engines can connect."""

from dataclasses import dataclass, field
from itertools import permutations

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.build.settings import ControlKeys
from pdpool_operator.plan.pool import control_keys

from tests.unit.operator.plan.makers import make_observed, make_pool

K = ControlKeys


@dataclass
class Pods:
    """Engine pods by role, with the keys with which each was built."""

    of: dict[Role, list[ControlKeys]] = field(default_factory=dict)

    def made_now(self, role: Role) -> ControlKeys:
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        have = all(keys is not K.NONE for keys in self.of[other])
        return control_keys(make_observed(make_pool(role), others_have_keys=have))

    def all_speak(self) -> bool:
        return all(_speak(p, d) for p in self.of[Role.PREFILL] for d in self.of[Role.DECODE])


def _speak(prefill: ControlKeys, decode: ControlKeys) -> bool:
    if prefill is K.NONE:
        return decode is not K.REQUIRED
    return decode is not K.NONE


def test_new_pools_insist_on_keys():
    for role in (Role.PREFILL, Role.DECODE):
        assert Pods({Role.PREFILL: [], Role.DECODE: []}).made_now(role) is K.REQUIRED


@pytest.mark.parametrize("order", sorted(set(permutations("PPDD"))), ids="".join)
def test_pods_are_replaced_in_any_order_and_always_understand_each_other(order):
    pods = Pods({Role.PREFILL: [K.NONE, K.NONE], Role.DECODE: [K.NONE, K.NONE]})
    turn = {Role.PREFILL: 0, Role.DECODE: 0}
    for _ in range(3):
        for letter in order:
            role = Role.PREFILL if letter == "P" else Role.DECODE
            pods.of[role][turn[role] % 2] = pods.made_now(role)
            turn[role] += 1
            assert pods.all_speak()
    assert {keys for role in pods.of.values() for keys in role} == {K.REQUIRED}
