"""The PyTorch model that ours is held against is itself held against the recorded reference."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from siamese_jax.interop.torch_model import TorchLanguageModel  # noqa: E402

GOLDEN = sorted((pathlib.Path(__file__).parent.parent / "golden").glob("[ab]*.npz"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_it_is_the_reference(path):
    golden = np.load(path)
    dtype = torch.float64 if path.stem.endswith("_f64") else torch.float32
    atol, rtol = (1e-10, 1e-10) if dtype == torch.float64 else (2e-5, 1e-5)
    weights = {name[6:]: torch.from_numpy(golden[name]) for name in golden.files if name.startswith("param/")}
    model = TorchLanguageModel(json.loads(str(golden["config"])), "transformer.ln_y_f.weight" in weights).to(dtype)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
    tokens = torch.from_numpy(golden["in/input_ids"])
    rotary = tuple(torch.from_numpy(golden[f"rope/{name}"]) for name in ("sin", "cos"))
    states = []
    logits = model(tokens, rotary, states)
    np.testing.assert_allclose(logits.detach(), golden["out/logits"], rtol=0, atol=atol)
    for i, streams in enumerate(states):
        for name, stream in zip("xy", streams, strict=False):
            np.testing.assert_allclose(stream.detach(), golden[f"state/{name}_{i}"], rtol=0, atol=atol)
    loss = model.loss(tokens, rotary)
    np.testing.assert_allclose(loss.detach(), golden["out/loss"], rtol=0, atol=atol)
    loss.backward()
    for name, parameter in model.named_parameters():
        expected = golden[f"grad/{name}"]
        limit = rtol * np.abs(expected).max()
        np.testing.assert_allclose(parameter.grad, expected, rtol=0, atol=limit, err_msg=name)
