"""Records a golden file from the PyTorch model, for options that the recorded files do not have."""

import json

import numpy as np
import torch

from siamese_jax.interop.torch_model import TorchLanguageModel, rotary_tables


def record(path, config: dict, two_stream: bool, dtype: str = "float64", seed: int = 0) -> None:
    """Writes outputs, streams and gradients of a model with random weights, in the documented format."""
    random = np.random.default_rng(seed)
    model = TorchLanguageModel(config, two_stream)
    weights = {
        name: random.normal(1.0 if weight.ndim == 1 else 0.0, 0.3, weight.shape).astype(np.float32)
        for name, weight in model.state_dict().items()
    }
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    model = model.to(getattr(torch, dtype))
    tokens = torch.from_numpy(random.integers(0, config["embedding_size"], (2, 12)))
    rotary = rotary_tables(12, config["d_model"] // config["n_heads"], config["rope_theta"])
    states = []
    arrays = {f"param/{name}": weight for name, weight in weights.items()} | {"in/input_ids": tokens.numpy()}
    arrays["out/logits"] = model(tokens, rotary, states).detach().numpy()
    loss = model.loss(tokens, rotary)
    loss.backward()
    arrays["out/loss"] = loss.detach().numpy()
    for i, streams in enumerate(states):
        arrays |= {f"state/{n}_{i}": s.detach().numpy() for n, s in zip("xy", streams, strict=False)}
    arrays |= {f"grad/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()}
    arrays |= {f"rope/{name}": table.numpy() for name, table in zip(("sin", "cos"), rotary, strict=True)}
    meta = {"case": path.stem, "dtype": dtype, "torch": torch.__version__}
    np.savez(path, meta=json.dumps(meta), config=json.dumps(config), **arrays)
