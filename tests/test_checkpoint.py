"""Checkpoints: what is restored is what was saved, bit for bit, or it is said in one line that it is not."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from siamese_jax import checkpoint as rooms
from siamese_jax.checkpoint import Checkpoints, available_steps, check_same, processes, read_about
from siamese_jax.errors import FaultError, InputError

ROOT = Path(__file__).parents[1]
ABOUT = {"config": {"lr": 3e-4, "name": "a é"}, "tokens": 12345678901234, "data": ["seed", 0, None]}


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(seed=0, width=6):
    """Every kind of leaf: five float and integer types, raw and typed random keys, empty optax states."""
    keys = jax.random.split(jax.random.key(seed), 3)
    kernel, bias = jax.random.normal(keys[0], (4, width)), jnp.zeros((width,), jnp.bfloat16) + 0.3
    params = {
        "dense": {"kernel": kernel, "bias": bias},
        "norm": {"scale": jnp.float32(0.1) * seed},
        "mask": jax.random.bernoulli(keys[1], 0.5, (7,)),
        "small": jnp.arange(-3, 4, dtype=jnp.int8),
        "half": jax.random.normal(keys[1], (5,), jnp.float16),
        "special": jnp.array([jnp.nan, jnp.inf, -0.0, 1e-40], jnp.float32),
        "raw_key": jax.random.key_data(keys[2]),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(jnp.int32(seed), params, optimizer.init({"dense": params["dense"]}), keys)


def bits_of(tree):
    def of(leaf):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

    return jax.tree.map(of, tree)


def same_bits(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and bits_of(one) == bits_of(other)


def shapes(tree):
    def of(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(of, tree)


def fill(folder, steps, **options):
    """Saves make_state(step) at each of `steps`."""
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            assert checkpoints.save(step, make_state(step), ABOUT | {"step": step})


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def run_python(code, **environment):
    """A process of its own, started; `code` finds the helpers of this file under `t`."""
    paths = [str(ROOT), str(ROOT / "tests")]
    head = f"import sys; sys.path[:0] = {paths}\nimport test_checkpoint as t\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        text=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )


def test_what_is_restored_is_what_was_saved_bit_for_bit(tmp_path):
    state = make_state(7)
    with Checkpoints(tmp_path / "deep" / "folder") as checkpoints:
        assert checkpoints.restore(shapes(state)) is None
        assert not (tmp_path / "deep").exists()
        assert checkpoints.save(7, state, ABOUT)
        checkpoints.check()
        checkpoints.wait()
        for target in shapes(state), state, jax.eval_shape(lambda: make_state(7)):
            step, restored, about = checkpoints.restore(target)
            assert step == 7 and about == ABOUT and same_bits(state, restored)
    assert jax.random.normal(restored.key[0]) == jax.random.normal(state.key[0])


def test_the_sum_is_that_of_the_bits_as_numpy_adds_them():
    from siamese_jax.checkpoint.arrays import bit_sum

    for leaf in jax.tree.leaves(make_state(3).params):
        word = {1: np.uint8, 2: np.uint16, 4: np.uint32}[leaf.dtype.itemsize]
        expected = int(np.asarray(leaf).reshape(-1).view(word).astype(np.uint64).sum()) % 2**32
        assert int(bit_sum(leaf)) == expected
    with jax.enable_x64(True):
        wide = jnp.array([1.5, -2.25, 1e300], jnp.float64)
        assert int(bit_sum(wide)) == int(np.asarray(wide).view(np.uint32).astype(np.uint64).sum()) % 2**32


def test_training_on_with_donated_buffers_leaves_the_save_alone(tmp_path):
    train = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * -1 - 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        state = {"small": jnp.ones((3,)), "large": jnp.arange(1 << 20, dtype=jnp.float32)}
        kept = {}
        for step in range(4):
            kept[step] = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
            assert checkpoints.save(step, state, {})
            for _ in range(5):
                state = train(state)
        for step in range(4):
            assert same_bits(kept[step], checkpoints.restore(shapes(state), step)[1])


def test_a_step_is_saved_once_and_in_flight_ones_do_not_count_yet(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(1, make_state(1), ABOUT)
        assert not checkpoints.save(1, make_state(2), ABOUT)
        assert checkpoints.steps() == [1]
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.save(1, make_state(2), ABOUT)
        assert same_bits(make_state(1), checkpoints.restore(shapes(make_state()))[1])


def test_the_newest_and_every_multiple_are_kept(tmp_path):
    fill(tmp_path, [1, 4, 5, 6, 10, 12, 13], keep=2, keep_every=5)
    assert available_steps(tmp_path) == [5, 10, 12, 13]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "12", "13", "5"]
    for wrong in {"keep": 0}, {"keep_every": -1}:
        with pytest.raises(InputError, match=r"keep=.* keep_every="):
            Checkpoints(tmp_path, **wrong)


def test_what_the_folder_says_without_arrays_and_without_traces(tmp_path):
    assert available_steps(tmp_path / "none") == []
    with pytest.raises(InputError, match=r"there is no checkpoint in .*; there are: none"):
        read_about(tmp_path)
    fill(tmp_path, [10, 20, 30])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert available_steps(str(tmp_path)) == [10, 20, 30]
    assert read_about(tmp_path) == (30, ABOUT | {"step": 30})
    assert read_about(tmp_path, 10) == (10, ABOUT | {"step": 10})
    with pytest.raises(InputError, match=r"there is no checkpoint 15 in .*; there are: 10, 20, 30"):
        read_about(tmp_path, 15)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(shapes(make_state()))
        with pytest.raises(InputError, match=r"there is no checkpoint 15 in .*; there are: 10, 20, 30"):
            checkpoints.restore(shapes(make_state()), 15)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    flip(tmp_path / "30" / "about.json", 1000)
    lines = []
    assert read_about(tmp_path, log=lines.append)[0] == 20
    assert len(lines) == 1 and "checkpoint 30 is broken" in lines[0]
    with pytest.raises(InputError, match="30: "):
        read_about(tmp_path, 30)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda s: s.params["dense"].update(kernel=jnp.zeros((4, 5))),
            r"'params/dense/kernel' is float32\[4, 6\] in checkpoint 2, but float32\[4, 5\] here",
        ),
        (
            lambda s: s.params["dense"].update(bias=jnp.zeros((6,)) + 0.3),
            r"'params/dense/bias' is bfloat16\[6\] in checkpoint 2, but float32\[6\] here",
        ),
        (
            lambda s: s.params.update(raw_key=jax.random.key(0)),
            r"'params/raw_key' is uint32\[2\] in checkpoint 2, but key<fry>\[\] here",
        ),
        (
            lambda s: s.params.update(Mask=s.params.pop("mask")),
            r"no array 'params/Mask' \(nearest: \['params/mask'\]\)",
        ),
        (lambda s: s.params.pop("mask"), r"1 arrays that are not here, the first is 'params/mask'"),
    ],
)
def test_a_target_that_does_not_fit_is_the_users_to_mend(tmp_path, change, message):
    fill(tmp_path, [1, 2])
    target, lines = make_state(2), []
    change(target)
    with Checkpoints(tmp_path, log=lines.append) as checkpoints:
        with pytest.raises(InputError, match=message) as error:
            checkpoints.restore(shapes(target))
    assert "\n" not in str(error.value) and not lines


def test_a_part_of_the_state_can_be_restored_alone(tmp_path):
    fill(tmp_path, [1])
    target = {"params": shapes(make_state(1).params)}
    with Checkpoints(tmp_path) as checkpoints:
        _, restored, _ = checkpoints.restore(target, partial=True)
        with pytest.raises(InputError, match="arrays that are not here"):
            checkpoints.restore(target)
    assert same_bits({"params": make_state(1).params}, restored)


def test_no_flipped_bit_is_restored_unnoticed(tmp_path):
    """100 single flips over all stored bits, one in each file: all are named, the older step is exact."""
    draw = random.Random(0)
    fill(tmp_path / "sound", [1, 2])
    older, newer, target = make_state(1), make_state(2), shapes(make_state())
    files = files_of(tmp_path / "sound" / "2")
    sizes = [path.stat().st_size for path in files]
    chosen = draw.choices(files, sizes, k=100) + files
    names = {path.name for path in files}
    assert names >= {"about.json", "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"}
    unnoticed, wrong = [], []
    for round_, path in enumerate(chosen):
        folder = tmp_path / f"{round_}"
        shutil.copytree(tmp_path / "sound", folder)
        bit = draw.randrange(8 * path.stat().st_size)
        flip(folder / path.relative_to(tmp_path / "sound"), bit)
        lines = []
        with Checkpoints(folder, log=lines.append) as checkpoints:
            step, state, about = checkpoints.restore(target)
        if not same_bits(state, newer if step == 2 else older) or about != ABOUT | {"step": step}:
            wrong.append((path, bit))
        if step == 2 or len(lines) != 1 or "checkpoint 2 is broken" not in lines[0] or "\n" in lines[0]:
            unnoticed.append((path, bit))
        shutil.rmtree(folder)
    assert not wrong and not unnoticed


def test_the_bit_sums_alone_notice_altered_arrays(tmp_path, monkeypatch):
    """What the file sums cannot see: array data that was altered before it was written, or is not listed."""
    draw = random.Random(1)
    monkeypatch.setattr(rooms.seal, "file_sum", lambda path: [0, 0])
    state = {"noise": jax.random.bits(jax.random.key(0), (1 << 14,)), "count": jnp.int32(3)}
    with Checkpoints(tmp_path / "sound") as checkpoints:
        checkpoints.save(1, state, {})
    data = max(files_of(tmp_path / "sound"), key=lambda path: path.stat().st_size)
    for round_ in range(10):
        folder = tmp_path / f"{round_}"
        shutil.copytree(tmp_path / "sound", folder)
        flip(folder / data.relative_to(tmp_path / "sound"), 8 * (1 << 12) + draw.randrange(8 * (1 << 14)))
        with Checkpoints(folder) as checkpoints, pytest.raises(InputError, match="is sound"):
            checkpoints.restore(shapes(state))


@pytest.mark.parametrize("harm", ["truncate", "empty", "delete"])
def test_harmed_files_are_named_and_the_one_before_is_taken(tmp_path, harm):
    fill(tmp_path / "sound", [10, 20, 30])
    target = shapes(make_state())
    for number, path in enumerate(files_of(tmp_path / "sound" / "30")):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "sound", folder)
        path = folder / path.relative_to(tmp_path / "sound")
        if harm == "delete":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: 0 if harm == "empty" else -1])
        lines = []
        with Checkpoints(folder, log=lines.append) as checkpoints:
            assert checkpoints.restore(target)[0] == 20
            with pytest.raises(InputError, match=r"checkpoint 30 in .* is broken"):
                checkpoints.restore(target, 30)
        assert len(lines) == 1 and path.name in lines[0] and "steps 21 to 30 are lost" in lines[0]
        assert "\n" not in lines[0] and len(lines[0]) < 400
        with Checkpoints(folder, strict=True) as checkpoints:
            with pytest.raises(InputError, match=r"checkpoint 30 .*; not tried: 10, 20"):
                checkpoints.restore(target)


def test_when_none_is_sound_nothing_starts_from_scratch(tmp_path):
    fill(tmp_path, [1, 2])
    for step in 1, 2:
        (tmp_path / str(step) / "_METADATA").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(InputError, match=r"is sound \(2: _METADATA is missing; 1: _METAD"):
            checkpoints.restore(shapes(make_state()))
        assert checkpoints.steps() == [1, 2]


def test_a_broken_step_is_saved_again_and_never_counts_as_newest(tmp_path):
    fill(tmp_path, [10, 20, 30])
    flip(tmp_path / "30" / "_sharding", 100)
    lines = []
    with Checkpoints(tmp_path, keep=2, log=lines.append) as checkpoints:
        assert checkpoints.restore(shapes(make_state()))[0] == 20
        assert checkpoints.steps() == [10, 20, 30]
        assert checkpoints.save(25, make_state(25), ABOUT)
        checkpoints.wait()
        assert checkpoints.steps() == [20, 25]
        assert checkpoints.save(30, make_state(31), ABOUT)
        checkpoints.wait()
        step, state, _ = checkpoints.restore(shapes(make_state()))
        assert step == 30 and same_bits(state, make_state(31))
        assert checkpoints.save(40, make_state(40), ABOUT)
        checkpoints.wait()
        assert checkpoints.steps() == [30, 40]
    assert (tmp_path / "30.aside1").exists()
    assert len(lines) == 2 and "30.aside1" in lines[1]


def test_going_back_to_an_older_step_moves_the_newer_ones_aside(tmp_path):
    fill(tmp_path, [10, 20, 30])
    for _ in range(2):
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.restore(shapes(make_state()), 10 if 10 in checkpoints.steps() else 12)
            assert checkpoints.save(12, make_state(12), ABOUT) or checkpoints.save(30, make_state(30), ABOUT)
    assert available_steps(tmp_path) == [30]
    assert {path.name for path in tmp_path.iterdir()} == {"30", "20.aside1", "30.aside1"}


def test_a_save_that_cannot_begin_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with Checkpoints(tmp_path / "file" / "folder") as checkpoints:
        with pytest.raises(FaultError, match=r"checkpoint 3 could not .*; there is no complete one"):
            checkpoints.save(3, make_state(), ABOUT)
        checkpoints.check()


def test_a_failure_is_told_once_and_does_not_hide_another_error(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    lines = []
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, log=lines.append) as checkpoints:
        checkpoints.save(1, make_state(), ABOUT)
        checkpoints.wait()
        monkeypatch.setattr(rooms.seal, "write", full)
        checkpoints.save(2, make_state(), ABOUT)
        raise ZeroDivisionError
    assert len(lines) == 1
    assert re.search(r"checkpoint 2 could not .*No space left.*; the newest complete one is 1$", lines[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, make_state(), ABOUT)
        with pytest.raises(FaultError, match="checkpoint 2"):
            checkpoints.save(3, make_state(), ABOUT)
        monkeypatch.undo()
        assert checkpoints.steps() == [1]
        assert checkpoints.save(3, make_state(3), ABOUT)
        checkpoints.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


@pytest.mark.parametrize("ask", ["check", "close", "save"])
def test_a_real_write_error_in_the_background_is_told_at_the_next_call(tmp_path, ask):
    """The kernel refuses to let a file grow, as on a full disk; EFBIG takes the place of ENOSPC."""
    process = run_python(f"""
        import resource, signal, time, jax, jax.numpy as jnp
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        large = {{'noise': jax.random.bits(jax.random.key(0), (1 << 20,))}}
        checkpoints = t.Checkpoints({str(tmp_path)!r})
        checkpoints.save(10, {{'noise': large['noise'] + 1}}, t.ABOUT)
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        checkpoints.save(20, large, t.ABOUT)
        try:
            if {ask!r} == 'check':
                deadline = time.time() + 30
                while time.time() < deadline:
                    checkpoints.check()
                    time.sleep(0.01)
            elif {ask!r} == 'close':
                checkpoints.close()
            else:
                checkpoints.save(30, large, t.ABOUT)
        except t.FaultError as fault:
            print(fault)
        assert checkpoints.steps() == [10]
        checkpoints.check()
        assert (checkpoints.restore(large)[1]['noise'] == large['noise'] + 1).all()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert checkpoints.save(20, large, t.ABOUT)
        checkpoints.close()
        assert sorted(path.name for path in t.Path({str(tmp_path)!r}).iterdir()) == ['10', '20']
    """)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.match(r"checkpoint 20 could not be saved in .*; the newest complete one is 10\n", out), out
    assert out.count("\n") == 1 and len(out) < 500, out
    assert "Traceback" not in err, err


def test_kill_in_the_middle_of_saving_leaves_sound_checkpoints(tmp_path):
    """SIGKILL at random moments of a loop that only saves: each time the newest restores as it was saved."""
    draw, newest = random.Random(2), 0
    for _ in range(3):
        process = run_python(f"""
            with t.Checkpoints({str(tmp_path)!r}, keep=2) as checkpoints:
                found = checkpoints.restore(t.shapes(t.make_state()))
                start = step = found[0] if found else 0
                while True:
                    step += 1
                    checkpoints.save(step, t.make_state(step), t.ABOUT | {{'step': step}})
                    if step == start + 2:
                        print('one is complete', flush=True)
        """)
        assert process.stdout.readline() == "one is complete\n", process.stderr.read()
        time.sleep(draw.random() / 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        lines = []
        with Checkpoints(tmp_path, log=lines.append) as checkpoints:
            step, state, about = checkpoints.restore(shapes(make_state()))
        assert not lines and step > newest and about == ABOUT | {"step": step}
        assert same_bits(state, make_state(step))
        newest = step
    fill(tmp_path, [newest + 1])
    assert all(re.fullmatch(r"\d+", path.name) for path in tmp_path.iterdir())


def test_eight_devices_restore_on_one_and_back(tmp_path):
    eight = run_python(
        f"""
        import jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((4, 2), ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)
        names = lambda leaf: ('fsdp', 'tensor') if leaf.shape == (4, 6) else ()
        place = lambda tree: jax.tree.map(lambda leaf: NamedSharding(mesh, P(*names(leaf))), tree)
        state = jax.device_put(t.make_state(5), place(t.make_state(5)))
        with t.Checkpoints({str(tmp_path)!r}) as checkpoints:
            if not checkpoints.steps():
                checkpoints.save(5, state, t.ABOUT)
            else:
                step, restored, about = checkpoints.restore(t.shapes(state))
                assert step == 6 and t.same_bits(restored, t.make_state(6))
                same = lambda one, other: one.sharding.is_equivalent_to(other.sharding, one.ndim)
                assert all(jax.tree.leaves(jax.tree.map(same, state, restored)))
    """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    _, err = eight.communicate(timeout=120)
    assert eight.returncode == 0, err
    with Checkpoints(tmp_path) as checkpoints:
        step, state, _ = checkpoints.restore(shapes(make_state()))
        assert step == 5 and same_bits(state, make_state(5))
        checkpoints.save(6, make_state(6), ABOUT)
    again = subprocess.Popen(
        eight.args,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    assert again.communicate(timeout=120)[1].count("Error") == 0 and again.returncode == 0


@pytest.mark.slow
def test_two_processes_share_one_verdict(tmp_path):
    """Two processes of two devices save, pass over a broken step, save it anew; one process restores it."""
    code = f"""
        import jax, jax.numpy as jnp
        from jax.experimental import multihost_utils
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        jax.config.update('jax_num_cpu_devices', 2)
        jax.distributed.initialize('127.0.0.1:%d', 2, %d, initialization_timeout=60,
                                   heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20)
        mesh = jax.make_mesh((4,), ('fsdp',), axis_types=(AxisType.Auto,))
        spec = lambda leaf: P('fsdp') if leaf.shape[:1] == (4,) else P()
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), jax.eval_shape(t.make_state))
        make = lambda seed: jax.jit(lambda: t.make_state(seed), out_shardings=shardings)()
        lines = []
        with t.Checkpoints({str(tmp_path)!r}, log=lines.append) as checkpoints:
            for step in 1, 2, 3:
                assert checkpoints.save(step, make(step), t.ABOUT)
            assert not checkpoints.save(3, make(3), t.ABOUT)
            if jax.process_index() == 1:
                t.flip(t.Path({str(tmp_path)!r}) / '3' / '_METADATA', 40)
            multihost_utils.sync_global_devices('flipped')
            step, state, about = checkpoints.restore(t.shapes(make(0)))
            assert step == 2 and about == t.ABOUT
            same = lambda one, other: jnp.array_equal(one, other, equal_nan=True)
            equal = jax.jit(lambda one, other: jax.tree.map(same, one.params, other.params))(state, make(2))
            assert all(jax.tree.leaves(equal))
            assert len(lines) == (jax.process_index() == 0), lines
            assert checkpoints.save(3, make(33), t.ABOUT)
    """
    port = random.randrange(20000, 60000)
    both = [run_python(code % (port, rank)) for rank in range(2)]
    for process in both:
        _, err = process.communicate(timeout=180)
        assert process.returncode == 0, err[-3000:]
    with Checkpoints(tmp_path) as checkpoints:
        step, state, _ = checkpoints.restore(shapes(make_state()))
    assert step == 3 and json.loads((tmp_path / "3" / "about.json").read_text())["about"] == ABOUT
    assert int(state.step) == 33


def test_digests_that_differ_between_processes_are_refused(monkeypatch):
    check_same("the questions", b"12345678")  # of one process there is nothing to compare
    rows = np.array([list(b"same"), list(b"same"), list(b"else")], np.uint8)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    monkeypatch.setattr(processes, "barrier", lambda name: None)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda own: rows)
    with pytest.raises(InputError, match="the questions differ between process 0 and 2"):
        check_same("the questions", b"same")
    rows[2] = rows[0]
    check_same("the questions", b"same")
