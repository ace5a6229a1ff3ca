"""What the recorded files of DeiT and DiT do not have, against PyTorch: distillation, other shapes and options."""

import json
import pathlib

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch_images import TorchDiT, TorchViT, record_dit, record_vit

from siamese_jax.interop.golden import compare_golden, format_golden

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
VIT = {"img_size": 12, "patch_size": 4, "in_chans": 1, "num_classes": 7, "embed_dim": 16, "depth": 3,
       "num_heads": 2, "mlp_ratio": 2.0, "qkv_bias": True, "distilled": True}  # fmt: skip
DIT = {"input_size": 8, "patch_size": 4, "in_channels": 3, "hidden_size": 16, "depth": 3, "num_heads": 2,
       "mlp_ratio": 2.0, "class_dropout_prob": 0.1, "num_classes": 5, "learn_sigma": True}  # fmt: skip


@pytest.fixture(autouse=True)
def wide_and_narrow_again():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def recorded(case):
    file = np.load(GOLDEN / f"{case}_f64.npz")
    weights = {name[6:]: torch.from_numpy(file[name]) for name in file.files if name.startswith("param/")}
    return file, json.loads(str(file["config"])), weights


@pytest.mark.parametrize(("case", "siamese"), [("c1_deit_siamese", True), ("c3_timm_vit_prenorm_baseline", False)])
def test_the_transcription_of_deit_is_the_recorded_model(case, siamese):
    file, config, weights = recorded(case)
    model = TorchViT(config, siamese)
    model.load_state_dict(weights)
    (logits,) = model.double()(torch.from_numpy(file["in/image"]).double(), [])
    np.testing.assert_allclose(logits.detach().numpy(), file["out/logits"], atol=1e-10)


def test_the_transcription_of_dit_is_the_recorded_model():
    file, config, weights = recorded("d1_dit_siamese")
    model, table = TorchDiT(config, True), weights.pop("pos_embed").double()
    model.load_state_dict(weights)
    x, features = (torch.from_numpy(file[name]).double() for name in ("in/x", "out/t_freq"))
    output = model.double()(x, features, torch.from_numpy(file["in/y"]), table, [])
    np.testing.assert_allclose(output.detach().numpy(), file["out/output"], atol=1e-10)


@pytest.mark.parametrize("siamese", [True, False], ids=["siamese", "pre"])
@pytest.mark.parametrize("head_weights", [(0.5, 0.5), pytest.param((1.0, 1.0), marks=pytest.mark.slow), (1.0, 0.0)])
def test_distilled_models_agree_however_their_heads_are_weighed(siamese, head_weights, tmp_path):
    path = tmp_path / "x_f64.npz"
    record_vit(path, VIT, siamese, head_weights)
    result = compare_golden(str(path))
    assert result["ok"], format_golden(result)
    assert {"logits", "logits_dist", "logits_eval", "loss"} <= {row["name"] for row in result["rows"]}
    assert "distilled" in result["model"] and result["atol"] == 1e-10


@pytest.mark.parametrize("siamese", [True, False], ids=["siamese", "pre"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"learn_sigma": False, "class_dropout_prob": 0.0}, marks=pytest.mark.slow),
        {"patch_size": 2, "in_channels": 1},
    ],
)
def test_other_diffusion_models_agree(siamese, changes, tmp_path):
    path = tmp_path / "x_f64.npz"
    record_dit(path, DIT | changes, siamese)
    result = compare_golden(str(path))
    assert result["ok"], format_golden(result)
    assert len([row for row in result["rows"] if row["name"].startswith("state/")]) == (8 if siamese else 4)
