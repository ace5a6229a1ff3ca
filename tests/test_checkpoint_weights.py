"""Checkpoints written and read array by array: the same on disk, and as careful."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import fill, make_state, run_python

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


def test_random_keys_are_read_as_the_words_that_are_stored(tmp_path):
    fill(tmp_path, [1])
    keys = jax.random.key_data(make_state(1).key)
    with open_weights(tmp_path) as opened:
        assert opened.shapes["key"] == jax.ShapeDtypeStruct(keys.shape, jnp.uint32)
        assert same_bits(opened.read("key"), keys)
        assert all(opened.read(name).shape == leaf.shape for name, leaf in opened.shapes.items())


def test_an_about_that_json_cannot_hold_is_told_before_any_work(tmp_path):
    asked = []
    with pytest.raises(TypeError, match="JSON"):
        write(tmp_path, read=asked.append, about={"note": object()})
    assert not asked and list(tmp_path.iterdir()) == []


def test_a_source_may_fill_one_buffer_again_and_again(tmp_path):
    buffer = np.empty(300, np.float32)

    def read(name):
        array = ARRAYS[name]
        buffer[: array.size] = array.reshape(-1)
        return buffer[: array.size].reshape(array.shape)

    write(tmp_path, read=read)
    buffer[:] = 0
    with open_weights(tmp_path) as opened:
        assert all(same_bits(opened.read(name), array) for name, array in ARRAYS.items())


# Head of the child processes: six arrays of `count` floats, each like no other.
LARGE = """
    import jax, jax.numpy as jnp, numpy as np, os, resource, signal
    from siamese_jax.checkpoint import open_weights, write_weights

    def shapes(count):
        return {{"params": {{name: jax.ShapeDtypeStruct((16, count // 16), jnp.float32) for name in names}}}}

    def make(name, count):
        return np.random.default_rng(ord(name[-1])).standard_normal((16, count // 16), np.float32)

    folder, names = {folder!r}, "abcdef"
"""


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def test_a_real_write_error_is_a_fault_that_leaves_nothing(tmp_path):
    """The kernel refuses to let a file grow, as on a full disk; EFBIG takes the place of ENOSPC."""
    code = """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        write_weights(folder, 0, shapes(1 << 20), lambda name: make(name, 1 << 20), {})
    except t.FaultError as fault:
        print(fault)
    assert os.listdir(folder) == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    write_weights(folder, 0, shapes(1 << 20), lambda name: make(name, 1 << 20), {})
    assert os.listdir(folder) == ["0"]
    """
    out, err = finish(run_python(LARGE.format(folder=str(tmp_path)) + code))
    assert out.startswith("checkpoint 0 could not be saved in ") and "File too large" in out, out
    assert out.count("\n") == 1 and "Traceback" not in err, err


def test_what_a_killed_process_left_is_written_over(tmp_path):
    code = """
    write_weights(folder, 0, shapes(160), lambda name: os.kill(os.getpid(), signal.SIGKILL), {})
    """
    process = run_python(LARGE.format(folder=str(tmp_path)) + code)
    process.communicate(timeout=120)
    assert process.returncode < 0 and available_steps(tmp_path) == [] and list(tmp_path.iterdir())
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_no_more_than_a_few_arrays_are_in_memory(tmp_path):
    """640 MiB together: neither writing nor reading raises the peak of the process by that much.

    A few arrays' worth, in freed memory that is not returned yet, does not depend on how many there are.
    """
    code = """
    def peak():
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    def write_and_read(step, count):
        start = peak()
        write_weights(folder, step, shapes(count), lambda name: make(name, count), {})
        written = peak()
        with open_weights(folder, step) as opened:
            for name in opened.shapes:
                assert (opened.read(name) == make(name, count)).all()
        return written - start, peak() - start

    names = "abcdefghij"
    write_and_read(0, 160)
    print(*write_and_read(1, 1 << 24))
    """
    out, _ = finish(run_python(LARGE.format(folder=str(tmp_path)) + code))
    written, read = map(float, out.split())
    assert written < 512 and read < 512, out
