"""The mesh of a configuration: sizes, batches, rows. Several devices are tried in test_sharded_step.py."""

import numpy as np
import pytest

from siamese_jax.config import base_config
from siamese_jax.errors import InputError
from siamese_jax.parallel.mesh import make_mesh, mesh_shape, micro_batches, own_rows, put_batch


def sizes(data, fsdp, tensor):
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [
        ((-1, 1, 1), 1, (1, 1, 1)),
        ((-1, 1, 1), 8, (8, 1, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((1, 2, -1), 8, (1, 2, 4)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((-1, 8, 1), 8, (1, 8, 1)),
    ],
)
def test_one_size_is_filled_in(given, devices, expected):
    assert mesh_shape(sizes(*given), devices) == expected


@pytest.mark.parametrize(
    ("given", "devices", "words"),
    [
        ((3, 1, 1), 8, ("mesh.data 3", "8 device(s)", "-1")),
        ((-1, 3, 1), 8, ("mesh.fsdp 3", "8 device(s)")),
        ((-1, 16, 1), 8, ("mesh.fsdp 16", "8 device(s)")),
        ((2, 2, 1), 8, ("mesh.tensor 1", "8 device(s)")),
        ((-1, -1, 1), 8, ("at most one is -1",)),
        ((0, 1, 1), 1, ("mesh.data 0", "1 or more")),
        ((-2, 1, 1), 1, ("mesh.data -2", "1 or more")),
    ],
)
def test_a_mesh_that_does_not_multiply_to_the_devices(given, devices, words):
    with pytest.raises(InputError) as caught:
        mesh_shape(sizes(*given), devices)
    assert all(word in str(caught.value) for word in words), caught.value


class Elsewhere:
    """What a mesh asks of a device: eight of them, four in each of two slices or hosts."""

    def __init__(self, number, platform):
        self.id, self.platform, self.device_kind = number, platform, "a kind"
        self.slice_index = self.process_index = number // 4
        self.client, self.coords, self.core_on_chip = None, (number % 4, 0, 0), 0

    def __repr__(self):
        return str(self.id)


def places(platform, *shape):
    devices = [Elsewhere(number, platform) for number in range(8)]
    return np.vectorize(lambda device: device.id)(make_mesh(sizes(*shape), devices).devices).tolist()


def test_only_data_crosses_slices_of_tpus():
    first, second = places("tpu", 2, 4, 1)
    assert sorted(first) == [[0], [1], [2], [3]] and sorted(second) == [[4], [5], [6], [7]]
    with pytest.raises(InputError, match=r"mesh.data 1 is not a multiple of the 2 slices"):
        places("tpu", 1, 8, 1)


def test_fsdp_crosses_hosts_of_gpus():
    assert places("gpu", 1, 8, 1) == [[[number] for number in range(8)]]
    assert places("gpu", 2, 2, 2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # tensor stays inside a host


class Split:
    """What check_batch reads of a mesh."""

    shape = sizes(2, 4, 2)


def training(batch_size, accumulation, sequences_per_device=0):
    made = base_config().training
    made.batch_size, made.accumulation = batch_size, accumulation
    made.sequences_per_device = sequences_per_device
    return made


def test_a_batch_that_the_axes_do_not_divide():
    assert micro_batches(training(16, 2), Split) == 2
    with pytest.raises(
        InputError, match=r"mesh.data 2 x mesh.fsdp 4 = 8 does not divide the 4 windows .* 16 .* 4\)"
    ):
        micro_batches(training(16, 4), Split)


@pytest.mark.parametrize(("most", "expected"), [(1, 12), (2, 6), (3, 4), (5, 3), (7, 2), (12, 1), (100, 1)])
def test_micro_batches_from_what_a_device_holds(most, expected):
    assert micro_batches(training(96, 1, most), Split) == expected  # 12 sequences a device and update


def test_rows_come_back_as_they_were_put():
    mesh = make_mesh(sizes(-1, 1, 1))
    rows = own_rows(mesh, 6)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]
    batch = {"inputs": np.arange(24, dtype=np.int32).reshape(6, 4)}
    placed = put_batch(batch, mesh, rows, 6)["inputs"]
    assert placed.shape == (6, 4) and (np.asarray(placed) == batch["inputs"]).all()
