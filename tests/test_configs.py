"""Every configuration in configs/ loads, is sound, and has the size that its docstring works out."""

import importlib.util
import math
import pathlib
import re

import jax
import pytest

from siamese_jax.config import check_config, model_config
from siamese_jax.models.initialize import count_kernels, count_parameters, parameter_shapes
from siamese_jax.training.metrics import flops_per_token
from siamese_jax.training.tasks import TASKS

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
SIZES = {
    "lm_390m_l10": 390.9,
    "lm_390m_l17": 388.2,
    "lm_390m_l33": 388.7,
    "lm_390m_l80": 387.1,
    "lm_1b": 1279.8,
}


@pytest.fixture
def load(monkeypatch):
    """Loads a file of configs/ as the programs do, with the repository's folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT))

    def read(path):
        spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return read


def sizes(config):
    """(all parameters, kernels and table, kernels) of a configuration."""
    shapes = parameter_shapes(model_config(config))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    kernels = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    return count_parameters(shapes), kernels + shapes["embedding"]["table"].size, kernels


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_can_work(path, load):
    module = load(path)
    check_config(module.get_config())
    assert module.__doc__ and module.__doc__.endswith((".", "\n"))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones_and_those_of_the_docstring(name, load):
    module = load(ROOT / "configs" / f"{name}.py")
    config = module.get_config()
    total, matrices, kernels = sizes(config)
    assert round(matrices / 1e6, 1) == SIZES[name]
    if name.startswith("lm_390m"):
        assert matrices == pytest.approx(388e6, rel=0.01)
    model = config.model
    assert model.mlp_hidden == 4 * model.width
    numbers = re.findall(r"\d[\d,]*\d", module.__doc__)
    assert {f"{total:,}", f"{matrices:,}", f"{kernels:,}", f"{config.training.steps:,}"} <= set(numbers)

    width = model.width  # heads times their width
    flops = flops_per_token(kernels, model.num_layers, width, config.data.length)
    tokens = config.training.batch_size * config.data.length * config.training.steps
    assert f"= {flops / 1e9:.2f}e9 a token" in module.__doc__
    assert f"= {tokens / 1e9:.1f}B" in module.__doc__
    exponent = 20 if name == "lm_1b" else 19
    assert f"{flops * tokens / 10**exponent:.2f}e{exponent} in all" in module.__doc__


@pytest.mark.parametrize("name", SIZES)
def test_the_pre_norm_baseline_of_the_docstring_has_its_size(name, load):
    module = load(ROOT / "configs" / f"{name}.py")
    config = module.get_config()
    config.model.residual, config.model.value_norm = "pre", "none"
    check_config(config)
    total, matrices, _ = sizes(config)
    assert f"(Pre-Norm: + {total - matrices:,})" in module.__doc__


IMAGE_SIZES = {"deit_tiny": 5_717_416, "deit_small": 22_050_664, "dit_b2": 130_315_808, "dit_l4": 457_988_224}


@pytest.mark.parametrize("name", IMAGE_SIZES)
def test_image_models_have_the_published_sizes_and_those_of_the_docstring(name, load):
    module = load(ROOT / "configs" / f"{name}.py")
    config = module.get_config()
    model = model_config(config)
    shapes = parameter_shapes(model)
    flops = TASKS[config.family].flops_per_unit(config, model)
    numbers = re.findall(r"\d[\d,]*\d", module.__doc__)
    assert {f"{count_parameters(shapes):,}", f"{count_kernels(shapes):,}"} <= set(numbers)
    exponent = int(math.log10(flops))
    assert f"{flops / 10**exponent:.2f}e{exponent} an image" in module.__doc__
    total = flops * config.training.batch_size * config.training.steps
    exponent = int(math.log10(total))
    assert f"{total / 10**exponent:.2f}e{exponent} in all" in module.__doc__
    config.model.residual = "pre"
    published = count_parameters(parameter_shapes(model_config(config)))
    assert published == IMAGE_SIZES[name] and f"{published:,}" in numbers
