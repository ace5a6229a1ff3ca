"""The table of partitions: every parameter of every model has one row, every mirror of one lies like it."""

import jax
import jax.numpy as jnp
import ml_collections
import pytest
from jax.sharding import PartitionSpec as P

from siamese_jax.config import base_config, model_config
from siamese_jax.errors import InputError
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.names import path_name
from siamese_jax.parallel import rules
from siamese_jax.parallel.rules import partition_of, state_shardings, widest_fsdp
from siamese_jax.residual.scheme import known_schemes
from siamese_jax.training.optimizer import make_optimizer
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.state import initial_state


class Devices:
    """A mesh as far as the table looks at it."""

    def __init__(self, data=1, fsdp=1, tensor=1):
        self.shape = {"data": data, "fsdp": fsdp, "tensor": tensor}


@pytest.fixture(autouse=True)
def no_real_mesh(monkeypatch):
    monkeypatch.setattr(rules, "NamedSharding", lambda mesh, spec: spec)


def config(**changes) -> ml_collections.ConfigDict:
    made = base_config()
    made.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return made


def specs(shapes, mesh=None) -> dict:
    placed = rules.parameter_shardings(shapes, mesh or Devices())
    leaves = jax.tree_util.tree_leaves_with_path(placed, is_leaf=lambda leaf: isinstance(leaf, P))
    return {path_name(path): spec for path, spec in leaves}


def test_the_partitions_of_a_language_model():
    found = specs(parameter_shapes(model_config(config())))
    assert found["embedding/table"] == P(None, "fsdp")
    assert found["head/kernel"] == P("fsdp", "tensor")
    assert found["layers/attention/qkv/kernel"] == P(None, "fsdp", "tensor", None, None)
    assert found["layers/attention/out/kernel"] == P(None, "tensor", "fsdp")
    assert found["layers/mlp/up/kernel"] == P(None, "fsdp", None, "tensor")
    assert found["layers/mlp/down/kernel"] == P(None, "tensor", "fsdp")
    assert found["layers/attention/query_norm/scale"] == P()
    plain = specs(parameter_shapes(model_config(config(model__activation="gelu", model__scan=False))))
    assert plain["layer_0/mlp/up/kernel"] == P("fsdp", "tensor")


@pytest.mark.parametrize("scheme", known_schemes())
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_every_parameter_has_one_row(scheme, norm):
    model = config(
        model__residual=scheme, model__norm=norm, model__use_bias=True, model__context_norm="full",
        model__value_norm="head", model__tie_embedding=norm == "layer",
    )  # fmt: skip
    shapes = parameter_shapes(model_config(model))
    found = specs(shapes)
    assert len(found) == len(jax.tree.leaves(shapes))
    for path, spec in found.items():
        axes = [axis for axis in spec if axis]
        assert len(axes) == len(set(axes)), path
        is_kernel = path.endswith(("kernel", "table"))
        assert ("fsdp" in axes) == is_kernel, path


def test_a_parameter_without_a_row_or_with_two(monkeypatch):
    with pytest.raises(InputError, match="layers/router/kernel is matched by no row of PARTITIONS"):
        partition_of("layers/router/kernel", 3)
    monkeypatch.setattr(rules, "PARTITIONS", (*rules.PARTITIONS, ("*/up/kernel", ("fsdp", "tensor"))))
    with pytest.raises(InputError, match="mlp/up/kernel and \\*/up/kernel of PARTITIONS"):
        partition_of("layers/mlp/up/kernel", 3)
    with pytest.raises(InputError, match="head/kernel has 3 dimensions a layer, its row in PARTITIONS has 2"):
        partition_of("head/kernel", 3)


def test_a_dimension_that_its_axis_does_not_divide():
    shapes = parameter_shapes(model_config(config()))  # width 256, 4 heads, hidden 1024
    with pytest.raises(InputError) as caught:
        specs(shapes, Devices(fsdp=3))
    assert all(word in str(caught.value) for word in ("mesh.fsdp 3", "256", "parameter ", "[")), caught.value
    with pytest.raises(
        InputError, match=r"mesh.tensor 8 does not divide the 4 of parameter layers/attention/qkv/kernel"
    ):
        specs(shapes, Devices(tensor=8))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimiser_lies_as_its_parameters(kind):
    made = config(optimizer__kind=kind, optimizer__ema=0.9)
    model = model_config(made)
    shapes = parameter_shapes(model)
    optimizer = make_optimizer(made.optimizer, make_schedule(made.schedule, 1000), shapes)
    state = jax.eval_shape(lambda: initial_state(model, optimizer, 0, True))
    placed = state_shardings(state, shapes, Devices())
    own = specs(shapes)
    leaves = jax.tree_util.tree_leaves_with_path(placed, is_leaf=lambda leaf: isinstance(leaf, P))
    mirrors = 0
    for path, spec in leaves:
        name = path_name(path)
        twin = next((own[end] for end in own if name.endswith("/" + end)), None)
        assert spec == (twin if twin is not None else P()), name
        mirrors += twin is not None
    moments = 2 if kind == "adamw" else 1  # Muon keeps one for its matrices
    assert mirrors >= (2 + moments) * len(own)  # parameters, average, moments


def test_state_that_mirrors_no_parameter_must_be_small():
    shapes = {"head": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    state = {"params": shapes, "other": {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)}}
    with pytest.raises(InputError, match=r"other/kernel \[64, 64\] mirrors no parameter"):
        state_shardings(state, shapes, Devices())


@pytest.mark.parametrize(("devices", "expected"), [(1, 1), (8, 8), (12, 4), (7, 1), (512, 256)])
def test_the_widest_fsdp_that_fits(devices, expected):
    assert widest_fsdp(parameter_shapes(model_config(config())), devices) == expected
