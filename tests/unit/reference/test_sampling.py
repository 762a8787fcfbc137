"""Greedy takes the largest; drawing follows the softmax, its cuts and its seed."""

import numpy as np
import pytest
from pdpool_reference.sampling import sample

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def draws(count=4000, **how):
    tokens = [sample(LOGITS, seed=11, position=i, **{"temperature": 1.0, **how}) for i in range(count)]
    return np.bincount(tokens, minlength=4) / count


def test_greedy_takes_the_lowest_of_the_largest():
    assert sample(np.array([1, 5, 5, 2], np.float32), temperature=0) == 1


def test_draws_follow_the_softmax():
    np.testing.assert_allclose(draws(), [0.1, 0.4, 0.2, 0.3], atol=0.03)


def test_temperature_sharpens():
    squares = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    np.testing.assert_allclose(draws(temperature=0.5), squares / squares.sum(), atol=0.03)


def test_top_k_leaves_the_likeliest():
    np.testing.assert_allclose(draws(top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "left"),
    [(0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_leaves_the_fewest_that_reach_it(top_p, left):
    assert {int(token) for token in np.flatnonzero(draws(500, top_p=top_p))} == left


def test_seed_and_position_decide():
    logits = np.zeros(1000, np.float32)
    same = [sample(logits, temperature=1.0, seed=5, position=3) for _ in range(3)]
    assert len(set(same)) == 1
    assert len({sample(logits, temperature=1.0, seed=5, position=i) for i in range(20)}) > 15
    assert len({sample(logits, temperature=1.0, seed=i, position=0) for i in range(20)}) > 15


def test_without_a_seed_draws_differ():
    logits = np.zeros(100_000, np.float32)
    assert len({sample(logits, temperature=1.0) for _ in range(10)}) > 1


@pytest.mark.parametrize("seed", [-1, 2**64 + 3, 2**70])
def test_any_integer_is_a_seed(seed):
    assert 0 <= sample(LOGITS, temperature=1.0, seed=seed) < 4


@pytest.mark.parametrize("temperature", [1e-8, 5e-324])
def test_tiny_temperature_is_greedy(temperature):
    assert sample(np.array([900, -900, 901], np.float32), temperature=temperature, seed=1) == 2


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"temperature": 1, "top_p": 0}, {"temperature": 1, "top_p": 2}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        sample(LOGITS, **wrong)
