"""A rotation replaces pods one at a time, in any order, and running engines can always connect."""

import random

import pytest
from pdpool_operator.api.key_epochs import KeyEpochs, next_epochs
from pdpool_operator.api.names import Role

SIDES = (Role.PREFILL, Role.DECODE)
Pods = dict[Role, list[KeyEpochs]]


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def all_connect(pods: Pods) -> bool:
    return all(p.newest in d.all and p.newest == p.oldest for p in pods[Role.PREFILL] for d in pods[Role.DECODE])


def replace_one(pods: Pods, role: Role, index: int, target: int) -> bool:
    """Replace one pod as the operator would; return whether that changed anything."""
    wanted = next_epochs(role, target, pods[other(role)])
    changed = pods[role][index] != wanted
    pods[role][index] = wanted
    return changed


def steps_until_done(pods: Pods, target: int, rng: random.Random) -> list[tuple[Role, KeyEpochs]]:
    """Replace outdated pods in a random order until none is; check the connections after each."""
    steps: list[tuple[Role, KeyEpochs]] = []
    for _ in range(200):
        outdated = [
            (role, index)
            for role in SIDES
            for index, keys in enumerate(pods[role])
            if keys != next_epochs(role, target, pods[other(role)])
        ]
        if not outdated:
            return steps
        role, index = rng.choice(outdated)
        replace_one(pods, role, index, target)
        assert all_connect(pods), (steps, pods)
        steps.append((role, pods[role][index]))
    raise AssertionError(f"no end after 200 steps: {pods}")


def test_rotation_goes_decode_both_then_prefill_then_decode_new():
    pods = {role: [KeyEpochs(1)] for role in SIDES}
    assert steps_until_done(pods, 2, random.Random(1)) == [
        (Role.DECODE, KeyEpochs(2, 1)),
        (Role.PREFILL, KeyEpochs(2)),
        (Role.DECODE, KeyEpochs(2)),
    ]


@pytest.mark.parametrize("seed", range(100))
def test_engines_connect_at_every_step_of_any_order(seed: int):
    rng = random.Random(seed)
    pods = {role: [KeyEpochs(1)] * rng.randint(1, 3) for role in SIDES}
    for target in (2, 3, 5):  # the last one skips an epoch
        steps_until_done(pods, target, rng)
        assert {keys for side in pods.values() for keys in side} == {KeyEpochs(target)}, "the old keys open nothing"


@pytest.mark.parametrize("seed", range(100))
def test_target_raised_in_mid_rotation_parts_no_engines(seed: int):
    rng = random.Random(seed)
    pods = {role: [KeyEpochs(1)] * rng.randint(1, 3) for role in SIDES}
    for target in (2, 2, 3, 3, 4, 4):
        for _ in range(rng.randint(0, 3)):
            role = rng.choice(SIDES)
            replace_one(pods, role, rng.randrange(len(pods[role])), target)
            assert all_connect(pods), pods
    steps_until_done(pods, 4, rng)
    assert all_connect(pods)


@pytest.mark.parametrize("role", SIDES)
def test_first_pods_of_a_namespace_get_the_newest_keys(role: Role):
    assert next_epochs(role, 3, []) == KeyEpochs(3)


@pytest.mark.parametrize("role", SIDES)
def test_lowered_target_takes_no_keys_back(role: Role):
    assert next_epochs(role, 1, [KeyEpochs(3)]) == KeyEpochs(3)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("1", KeyEpochs(1)),
        ("12", KeyEpochs(12)),
        ("3-2", KeyEpochs(3, 2)),
        *((text, None) for text in ("", "0", "01", "-1", "2-", "2-1-0", "x", "1 ", "99999")),
    ],
)
def test_annotation_is_read_as_written_or_not_at_all(text: str, keys: KeyEpochs | None):
    assert KeyEpochs.parse(text) == keys
    assert keys is None or str(keys) == text
