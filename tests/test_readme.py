"""Every Python block of the README runs, and every file and flag it names exists."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_block_runs(block, monkeypatch):
    from siamese_jax.residual import scheme

    monkeypatch.setattr(scheme, "_SCHEMES", dict(scheme._SCHEMES))  # a scheme that a block registers goes again
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    if "Model" in names:
        model, h = names["Model"](), jax.random.normal(jax.random.key(0), (2, 8, 64))
        out = model.apply(model.init(jax.random.key(1), h), h)
        assert out.shape == h.shape and jnp.isfinite(out).all()
    if "out" in names:
        assert names["out"].shape == names["x"].shape and jnp.isfinite(names["out"]).all()


def test_files_exist():
    named = set(re.findall(r"(?:configs/\w+\.py|train\.py|eval\.py|requirements[\w-]*\.txt)", README))
    assert named and all((ROOT / name).exists() for name in named), named


def test_configuration_keys_exist():
    from siamese_jax.config import base_config, flat_items
    from siamese_jax.models.families import FAMILIES

    known = {key for family in FAMILIES for key in flat_items(base_config(family))}
    for text in (README, (ROOT / "docs" / "images-and-diffusion.md").read_text(encoding="utf-8")):
        keys = set(re.findall(r"--config\.([a-z_.]+)=", text))
        assert keys and keys <= known, keys - known
