"""Checkpoints written and read array by array: the same on disk, and as careful."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.checkpoint import Checkpoints, available_steps, open_weights, write_weights
from siamese_jax.checkpoint.arrays import bit_sum
from siamese_jax.checkpoint.weights import host_bit_sum
from siamese_jax.errors import FaultError, InputError

ARRAYS = {
    "params/a/kernel": np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32),
    "params/b/scale": np.array([0.0, -0.0, np.inf, np.nan, 1e-45, -1e-40], np.float32),
    "params/c": np.array([np.uint32(0x7FC12345), np.uint32(0xFFFFFFFF)]).view(np.float32),  # NaNs with payloads
    "params/wide": np.arange(300, dtype=np.float32).reshape(3, 100),
}


def tree_of(arrays):
    tree = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


SHAPES = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree_of(ARRAYS))


def write(folder, step=0, read=ARRAYS.__getitem__, about=None):
    write_weights(folder, step, SHAPES, read, about or {"note": "x"})


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


def test_every_bit_comes_back(tmp_path):
    write(tmp_path)
    with open_weights(tmp_path) as opened:
        assert opened.step == 0 and opened.about == {"note": "x"}
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in opened.shapes.items()} == {
            name: (array.shape, array.dtype) for name, array in ARRAYS.items()
        }
        assert all(same_bits(opened.read(name), array) for name, array in ARRAYS.items())
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_training_run_restores_it(tmp_path):
    write(tmp_path, step=3)
    with Checkpoints(tmp_path) as checkpoints:
        step, state, about = checkpoints.restore(SHAPES)
        assert step == 3 and about == {"note": "x"}
        part = {"params": {"b": SHAPES["params"]["b"]}}
        _, partial, _ = checkpoints.restore(part, partial=True)
    for name, array in ARRAYS.items():
        assert same_bits(jax.tree.leaves(state)[sorted(ARRAYS).index(name)], array)
    assert same_bits(partial["params"]["b"]["scale"], ARRAYS["params/b/scale"])


def test_what_a_training_run_saved_is_read(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, jax.tree.map(jnp.asarray, tree_of(ARRAYS)), {"step": step})
    for step in (None, 1):
        with open_weights(tmp_path, step) as opened:
            assert opened.about == {"step": step or 2}
            assert all(same_bits(opened.read(name), array) for name, array in ARRAYS.items())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, bool, np.uint32])
def test_sums_are_those_of_the_device(dtype):
    array = np.random.default_rng(0).integers(0, 2, (33, 5)).astype(dtype)
    assert host_bit_sum(array) == int(bit_sum(jnp.asarray(array)))
    assert host_bit_sum(ARRAYS["params/b/scale"]) == int(bit_sum(jnp.asarray(ARRAYS["params/b/scale"])))


def test_arrays_are_asked_for_one_at_a_time_and_once(tmp_path):
    asked = []

    def read(name):
        asked.append(name)
        return ARRAYS[name]

    write(tmp_path, read=read)
    assert sorted(asked) == sorted(ARRAYS)


@pytest.mark.parametrize("failure", [InputError("broken source"), KeyboardInterrupt()])
def test_what_the_source_raises_comes_through_and_nothing_stays(failure, tmp_path):
    def read(name):
        if name == "params/c":
            raise failure
        return ARRAYS[name]

    with pytest.raises(type(failure)) as caught:
        write(tmp_path, read=read)
    assert caught.value is failure
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_gives_another_shape_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"params/c is float32\(3,\), not float32\(2,\)"):
        write(tmp_path, read=lambda name: np.zeros(3, np.float32) if name == "params/c" else ARRAYS[name])
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_written_over(tmp_path):
    write(tmp_path)
    with pytest.raises(InputError, match="checkpoint 0 exists"):
        write(tmp_path)
    assert available_steps(tmp_path) == [0]


def test_a_place_that_takes_nothing_is_a_fault(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FaultError, match="checkpoint 0 could not be saved"):
        write(tmp_path / "file" / "checkpoints")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def damage(folder, how):
    """Changes the largest file of a checkpoint."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content if how == "flipped" else content[:-5])


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_checkpoint_is_passed_over_or_refused(how, tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    damage(tmp_path / "2", how)
    said = []
    with open_weights(tmp_path, log=said.append) as opened:
        assert opened.step == 1
    assert len(said) == 1 and "checkpoint 2 is broken" in said[0]
    with pytest.raises(InputError, match=r"sound \(2: "):
        open_weights(tmp_path, 2)
    damage(tmp_path / "1", how)
    with pytest.raises(InputError, match="no checkpoint asked for") as caught:
        open_weights(tmp_path)
    assert "2: " in str(caught.value) and "\n" not in str(caught.value)


def test_damage_after_opening_is_noticed_by_the_array(tmp_path):
    write(tmp_path)
    with open_weights(tmp_path) as opened:
        opened._table["params/wide"]["sum"] += 1
        assert same_bits(opened.read("params/c"), ARRAYS["params/c"])
        with pytest.raises(InputError, match="params/wide is altered"):
            opened.read("params/wide")


def test_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match=r"there is no checkpoint in .* there are: none"):
        open_weights(tmp_path / "nothing")
    write(tmp_path, 4)
    with pytest.raises(InputError, match=r"there is no checkpoint 3 in .* there are: 4"):
        open_weights(tmp_path, 3)
