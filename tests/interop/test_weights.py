"""Files of PyTorch weights: what is read and written, and how every broken one ends."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from siamese_jax.errors import FaultError, InputError
from siamese_jax.interop.weights import SafetensorsWriter, open_weights_file

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


# Not ru_maxrss: a child starts with its parent's, which hides what it takes itself.
PEAK = """
        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
"""
on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")


def some_tensors(dtype="float32"):
    random = np.random.default_rng(0)
    tensors = {"a.weight": random.normal(size=(3, 5)), "b": random.normal(size=7), "empty": np.zeros((0, 4))}
    tensors["special"] = np.array([0.0, -0.0, np.inf, -np.inf, 1e-5])
    if dtype == "float32":  # PyTorch narrows a NaN to another NaN
        tensors["nan"] = np.array([0x7FC12345, 0xFF800001], np.uint32).view(np.float32)
    return {name: tensor.astype(TYPES[dtype]) for name, tensor in tensors.items()}


def write(path, tensors, dtype="float32"):
    with SafetensorsWriter(path, {name: tensor.shape for name, tensor in tensors.items()}, dtype) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name].astype(np.float32))
    return path


def assert_holds(file, tensors):
    assert file.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        read = file.read(name)
        assert read.dtype == np.float32
        assert np.array_equal(read.view(np.uint32), tensor.astype(np.float32).view(np.uint32)), name


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_written_is_read_by_us_and_by_the_library(dtype, tmp_path):
    tensors = some_tensors(dtype)
    path = write(tmp_path / "x.safetensors", tensors, dtype)
    with open_weights_file(path) as file:
        assert_holds(file, tensors)
        assert set(file.types.values()) == {dtype}
        assert file.size == sum(tensor.nbytes for tensor in tensors.values())
    theirs = safetensors.numpy.load_file(path)
    assert all(theirs[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert path.read_bytes()[8] == ord("{") and int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("dtype", TYPES)
def test_pytorch_reads_what_is_written(dtype, tmp_path):
    torch = pytest.importorskip("torch")
    import safetensors.torch

    tensors = some_tensors(dtype)
    theirs = safetensors.torch.load_file(write(tmp_path / "x.safetensors", tensors, dtype))
    for name, tensor in tensors.items():
        assert theirs[name].dtype == getattr(torch, dtype) and theirs[name].shape == tensor.shape
        assert np.array_equal(theirs[name].float().numpy(), tensor.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrowing_rounds_to_nearest_and_ties_to_even(dtype, tmp_path):
    bits = {"bfloat16": 7, "float16": 10}[dtype]
    step = 2.0**-bits
    given = np.array([1 + 0.5 * step, 1 + 1.5 * step, 1 + 0.51 * step, 1 + 0.49 * step], np.float32)
    with open_weights_file(write(tmp_path / "x.safetensors", {"a": given}, dtype)) as file:
        assert file.read("a").tolist() == [1, 1 + 2 * step, 1 + step, 1]


@pytest.mark.parametrize("dtype", TYPES)
def test_what_the_library_writes_is_read(dtype, tmp_path):
    tensors = some_tensors(dtype)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with open_weights_file(tmp_path) as file:  # a folder
        assert_holds(file, tensors)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["x.pt", "pytorch_model.bin"])
def test_pickles_of_tensors_are_read(dtype, name, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = some_tensors(dtype)
    state = {key: torch.from_numpy(t.astype(np.float32)).to(getattr(torch, dtype)) for key, t in tensors.items()}
    torch.save(state, tmp_path / name)
    with open_weights_file(tmp_path / name) as file:
        assert_holds(file, tensors)
        assert_holds(file, tensors)  # given away, and loaded again
    torch.save({"state_dict": state}, tmp_path / name)
    with open_weights_file(tmp_path / name) as file:
        assert_holds(file, tensors)


def test_tied_tensors_of_a_pickle(tmp_path):
    torch = pytest.importorskip("torch")
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": shared, "b": shared, "c": shared.T}, tmp_path / "x.pt")
    with open_weights_file(tmp_path / "x.pt") as file:
        assert file.read("a").tolist() == file.read("b").tolist() == file.read("c").T.tolist()
    with open_weights_file(tmp_path / "x.pt") as file:
        with pytest.raises(ValueError, match="read-only"):  # or `b` would change too
            file.read("a")[:] = 7


def test_an_index_of_several_files(tmp_path):
    tensors = some_tensors()
    names = sorted(tensors)
    for i, part in enumerate((names[:2], names[2:])):
        write(tmp_path / f"part{i}.safetensors", {name: tensors[name] for name in part})
    table = {name: f"part{int(name not in names[:2])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    with open_weights_file(tmp_path) as file:
        assert file.shapes == {name: tensors[name].shape for name in file.shapes} and len(file.shapes) == len(names)
        for name in reversed(names):
            assert np.array_equal(file.read(name), tensors[name], equal_nan=True)


def test_an_index_of_several_pickles(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "2.bin")
    table = {"weight_map": {"a": "1.bin", "b": "2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(table))
    with open_weights_file(tmp_path) as file:
        assert file.read("b").tolist() == [0, 0, 0] and file.read("a").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (["module.a", "module.b"], ["a", "b"]),
        (["_orig_mod.module.a"], ["a"]),
        (["module._orig_mod.a"], ["a"]),
        (["model.transformer.a", "model.transformer.b"], ["transformer.a", "transformer.b"]),
        (["model.layers.0.a", "model.embed"], ["model.layers.0.a", "model.embed"]),
        (["module.a", "b"], ["module.a", "b"]),
    ],
)
def test_prefixes_of_wrappers_are_left_out(stored, read, tmp_path):
    tensors = {name: np.full(2, i, np.float32) for i, name in enumerate(stored)}
    with open_weights_file(write(tmp_path / "x.safetensors", tensors)) as file:
        assert sorted(file.shapes) == sorted(read)
        assert [file.read(name)[0] for name in read] == list(range(len(read)))


def refused(path, *words):
    with pytest.raises(InputError) as caught:
        open_weights_file(path)
    message = str(caught.value)
    assert all(str(word) in message for word in words), message
    plain = len(message) - message.count(str(path)) * len(str(path))
    assert "\n" not in message and "\x1b" not in message and plain <= 180


def test_broken_and_wrong_files_end_in_one_line(tmp_path):
    good = write(tmp_path / "good.safetensors", some_tensors())
    broken = tmp_path / "broken.safetensors"
    for content in (b"", b"\x00" * 20, good.read_bytes()[:60], good.read_bytes()[:-3], b"{}"):
        broken.write_bytes(content)
        refused(broken, broken, "not a whole .safetensors file")
    refused(tmp_path / "nothing.safetensors", "no weights file")
    (tmp_path / "x.txt").write_text("text")
    refused(tmp_path / "x.txt", "no weights file", ".safetensors", ".pt")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "no weights", "model.safetensors", "pytorch_model.bin")
    write(tmp_path / "none.safetensors", {})
    refused(tmp_path / "none.safetensors", "holds no tensors")


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    write(tmp_path / "1.safetensors", {"a": np.zeros(2, np.float32)})
    index = tmp_path / "x.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "a": "1.safetensors"}}')
    refused(index, index, "'a' stands there twice")
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(path, path, "'a' stands there twice")


def test_broken_indexes_end_in_one_line(tmp_path):
    write(tmp_path / "1.safetensors", {"a": np.zeros(2, np.float32)})
    write(tmp_path / "2.safetensors", {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    index = tmp_path / "x.index.json"
    for content in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        refused(index, "not an index of weights")
    index.write_text(json.dumps({"weight_map": {"a": "3.safetensors"}}))
    refused(index, "3.safetensors", "does not exist")
    index.write_text(json.dumps({"weight_map": {"c": "1.safetensors"}}))
    refused(index, "1.safetensors", "lacks the tensor c")
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    refused(index, "a is in two")


def test_types_that_would_be_rounded_are_named(tmp_path):
    safetensors.numpy.save_file({"x": np.zeros(2), "n": np.zeros(2, np.int64)}, tmp_path / "x.safetensors")
    with open_weights_file(tmp_path / "x.safetensors") as file:
        for name, kind in (("x", "float64"), ("n", "int64")):
            with pytest.raises(InputError, match=f"{name} is {kind}.*float32"):
                file.read(name)


def test_sizes_of_types_that_are_not_read(tmp_path):
    torch = pytest.importorskip("torch")
    import safetensors.torch

    tensors = {"f8": torch.ones(3).to(torch.float8_e4m3fn), "c": torch.zeros(2, dtype=torch.complex64)}
    tensors |= {"n": torch.tensor(3), "b": torch.ones(5, dtype=torch.bool)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    torch.save(tensors, tmp_path / "x.pt")
    for name in ("x.safetensors", "x.pt"):
        with open_weights_file(tmp_path / name) as file:
            assert file.size == 3 + 16 + 8 + 5 and file.shapes["n"] == ()
            assert file.types == {"f8": "float8_e4m3fn", "c": "complex64", "n": "int64", "b": "bool"}
            with pytest.raises(InputError, match="f8 is float8_e4m3fn"):
                file.read("f8")


class Malicious:
    """Pickled, it would make a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_with_anything_but_tensors_are_refused_and_run_nothing(tmp_path):
    torch = pytest.importorskip("torch")
    path, mark = tmp_path / "x.pt", tmp_path / "executed"
    torch.save({"a": torch.zeros(2), "b": Malicious(mark)}, path)
    refused(path, path, "tensors alone", "mkdir")
    assert not mark.exists()
    for found, words in (
        ({"a": torch.zeros(2), "epoch": 3}, ("'epoch'", "int")),
        ({"a": {"b": torch.zeros(2)}}, ("'a'", "dict")),
        ([torch.zeros(2)], ("list",)),
        (torch.zeros(2), ("Tensor", "not a table")),
        ({"model": {"a": torch.zeros(2)}, "epoch": 3}, ("'model'", "dict")),
        ({1: torch.zeros(2), "1": torch.zeros(2)}, ("1", "int")),
        ({"a": torch.zeros(2), "n": np.zeros(2)}, ("numpy",)),
        (torch.nn.Linear(1, 1), ("torch.nn.modules.linear.Linear",)),
        ({"a": torch.empty(2, device="meta")}, ("'a'", "meta")),
    ):
        torch.save(found, path)
        refused(path, path, *words)
    torch.save({"a": torch.zeros(1000)}, path)
    for content in (path.read_bytes()[:2000], b"", b"text", b"version https://x", b"<html>"):
        path.write_bytes(content)
        refused(path, path, "tensors alone", "damaged, or no PyTorch file")


@pytest.mark.filterwarnings("ignore:Validating sparse:UserWarning")
def test_sparse_tensors_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "'a'", "sparse")


def run_python(code):
    code = textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_without_pytorch_safetensors_work_and_pickles_say_what_is_missing(tmp_path):
    write(tmp_path / "x.safetensors", some_tensors("bfloat16"), "bfloat16")
    (tmp_path / "x.pt").write_bytes(b"PK")
    ended = run_python(f"""
        import sys
        sys.modules["torch"] = None
        from siamese_jax.errors import InputError
        from siamese_jax.interop.weights import open_weights_file
        with open_weights_file({str(tmp_path / "x.safetensors")!r}) as file:
            print(file.read("a.weight").shape)
        try:
            open_weights_file({str(tmp_path / "x.pt")!r})
        except InputError as error:
            print(error)
    """)
    assert ended.stdout.startswith("(3, 5)\n") and "pip install torch" in ended.stdout, ended.stderr


@on_linux
def test_reading_tensor_by_tensor_holds_one_in_memory(tmp_path):
    count, size = 25, 2_000_000  # 200 MB
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, {f"t{i}": (size,) for i in range(count)}) as writer:
        for i in range(count):
            writer.write(f"t{i}", np.full(size, i, np.float32))
    ended = run_python(
        PEAK
        + f"""
        from siamese_jax.interop.weights import open_weights_file
        before = peak()
        with open_weights_file({str(path)!r}) as file:
            total = sum(float(file.read(name)[0]) for name in file.shapes)
        print(total, peak() - before)
    """
    )
    total, grown = map(float, ended.stdout.split())
    assert total == sum(range(count)) and grown < 0.3 * path.stat().st_size


def test_a_failed_write_leaves_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, {"a": (2,)}) as writer:
        writer.write("a", np.zeros(2, np.float32))
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="a among them"), SafetensorsWriter(path, {"a": (2,), "b": (1,)}) as writer:
        writer.write("b", np.zeros(1, np.float32))
    for name, shape in (("a", (3,)), ("c", (2,))):
        with pytest.raises(ValueError, match=name), SafetensorsWriter(path, {"a": (2,)}) as writer:
            writer.write(name, np.zeros(shape, np.float32))
    with pytest.raises(InputError, match="a has a value beyond float16"):
        write(path, {"a": np.array([1e6], np.float32)}, "float16")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_the_file_is_finished_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x.safetensors", some_tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_value_beyond_float16_is_told_beside_values_that_are_not_finite(tmp_path):
    with pytest.raises(InputError, match=r"a has a value beyond float16 \(1e\+06\)"):
        write(tmp_path / "x.safetensors", {"a": np.array([1e6, np.nan, np.inf], np.float32)}, "float16")


def test_the_name_that_the_format_keeps_for_itself_is_no_tensor(tmp_path):
    with pytest.raises(ValueError, match="__metadata__"):
        SafetensorsWriter(tmp_path / "x.safetensors", {"__metadata__": (2,)})


def test_what_exists_is_not_written_over(tmp_path):
    path = write(tmp_path / "x.safetensors", some_tensors())
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists"):
        write(path, some_tensors("float16"), "float16")
    assert path.read_bytes() == before
    link = tmp_path / "link.safetensors"
    link.symlink_to("nowhere")
    with pytest.raises(InputError, match="exists"):
        write(link, some_tensors())
    assert link.is_symlink()


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        write(tmp_path / "missing" / "x.safetensors", some_tensors())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        write(tmp_path / "file" / "x.safetensors", some_tensors())
    (tmp_path / "file").unlink()
    if os.path.exists("/dev/full"):
        writer = SafetensorsWriter(tmp_path / "x.safetensors", {"a": (200_000,)})
        writer._part = tmp_path / "full"
        writer._part.symlink_to("/dev/full")
        with pytest.raises(FaultError, match="No space left"), writer:
            writer.write("a", np.zeros(200_000, np.float32))
        assert list(tmp_path.iterdir()) == []
