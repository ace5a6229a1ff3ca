"""Rotary positions: the table in numpy, lengths kept, and scores that depend on distances only."""

import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.layers.rotary import rotary_tables, rotate

THETA = 10_000.0
random = np.random.default_rng(0)


def test_table_is_that_of_numpy():
    sin, cos = rotary_tables(jnp.arange(7), 8, THETA)
    frequencies = THETA ** (-np.arange(0, 8, 2) / 8)
    angles = np.outer(np.arange(7), frequencies)
    angles = np.concatenate([angles, angles], axis=-1)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)


def test_table_at_long_positions_is_good_to_the_precision_of_float32_angles():
    sin, _ = rotary_tables(jnp.array([8191]), 128, THETA)
    angles = 8191 * THETA ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(sin[0, :64], np.sin(angles), atol=8191 * 1.2e-7)


def test_rotation_is_that_of_complex_numbers():
    x = random.normal(size=(2, 5, 3, 8)).astype(np.float32)
    rotated = np.asarray(rotate(jnp.asarray(x), *rotary_tables(jnp.arange(5), 8, THETA)))
    angles = np.outer(np.arange(5), THETA ** (-np.arange(0, 8, 2) / 8))[None, :, None]
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(rotated[..., :4] + 1j * rotated[..., 4:], expected, atol=2e-6)


def test_lengths_are_kept_and_position_0_is_left_alone():
    x = random.normal(size=(2, 5, 3, 8)).astype(np.float32)
    rotated = np.asarray(rotate(jnp.asarray(x), *rotary_tables(jnp.arange(5), 8, THETA)))
    np.testing.assert_allclose(
        np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6
    )  # fmt: skip
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])


def test_scores_depend_on_the_distance_only():
    q, k = (random.normal(size=(1, 1, 1, 16)).astype(np.float32) for _ in range(2))

    def score(query_position, key_position):
        tables = (rotary_tables(jnp.array([position]), 16, THETA) for position in (query_position, key_position))
        rotated = [rotate(jnp.asarray(x), *table) for x, table in zip((q, k), tables, strict=True)]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) == pytest.approx(score(5, 0), abs=1e-5)
    assert abs(score(9, 4) - score(4, 9)) > 1e-2


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_tables_per_sequence_and_shared_ones_agree(heads):
    x = jnp.asarray(random.normal(size=(2, 5, *heads, 8)), jnp.float32)
    positions = jnp.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    each = rotate(x, *rotary_tables(positions, 8, THETA))
    for row in (0, 1):
        shared = rotate(x[row : row + 1], *rotary_tables(positions[row], 8, THETA))
        np.testing.assert_array_equal(each[row], shared[0])


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(random.normal(size=(1, 5, 2, 8)), jnp.bfloat16)
    tables = rotary_tables(jnp.arange(5), 8, THETA)
    actual = rotate(x, *tables)
    assert actual.dtype == jnp.bfloat16
    expected = rotate(x.astype(jnp.float32), *tables).astype(jnp.bfloat16)
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
