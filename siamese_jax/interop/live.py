"""A small model in PyTorch and in JAX, side by side: every part of training compared, one by one.

Both get the same weights and batches. On our side the update is that of training: the model, its loss,
make_optimizer, make_schedule and make_train_step; the parts before it are compared by themselves.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from siamese_jax.config import base_config
from siamese_jax.errors import InputError
from siamese_jax.interop import reference
from siamese_jax.interop.golden import format_rows
from siamese_jax.interop.golden_language import language_outputs
from siamese_jax.interop.layout import join_all, split_all
from siamese_jax.interop.recorded import Row, difference
from siamese_jax.layers.rotary import rotary_tables
from siamese_jax.models.initialize import TRUNCATION, initial_parameters
from siamese_jax.models.language import INITIALIZERS, LanguageConfig, LanguageModel
from siamese_jax.training.language_task import language_loss
from siamese_jax.training.optimizer import make_optimizer, weight_decay_mask
from siamese_jax.training.schedule import make_schedule
from siamese_jax.training.state import TrainState
from siamese_jax.training.step import make_train_step

BATCH, LENGTH = 4, 32
SHAPE = LanguageConfig(
    num_layers=3, width=32, num_heads=4, num_kv_heads=2, mlp_hidden=48, vocab_size=96, vocab_multiple=1,
    loss_slice=8,
)  # fmt: skip
HEAD_NORMS = {"query_norm": "head", "key_norm": "head", "value_norm": "head"}
MODELS = {
    "siamese_hybrid": dataclasses.replace(SHAPE, residual="siamese_hybrid", **HEAD_NORMS),
    "hybrid": dataclasses.replace(SHAPE, residual="hybrid", **HEAD_NORMS),
    "hybrid_star": dataclasses.replace(SHAPE, residual="hybrid_star", **HEAD_NORMS),
    "pre": dataclasses.replace(SHAPE, residual="pre", query_norm="none", key_norm="none"),
    "reordered": dataclasses.replace(SHAPE, residual="reordered", query_norm="full", key_norm="full"),
}
PEAK, WARMUP, FLOOR, CLIP = 1e-2, 10, 0.1, 1.0
# Limits by compute type: outputs (absolute), gradients and single quantities (relative to the largest value),
# the loss at every step (relative), and the parameters at the end (relative to the largest of each tensor).
# AdamW divides every gradient by its own size: where it is almost nothing, rounding alone decides the update.
LIMITS = {
    "float32": {"output": 2e-5, "part": 1e-5, "curve": 1e-4, "final": 1e-3},
    "float64": {"output": 1e-10, "part": 1e-10, "curve": 1e-8, "final": 1e-6},
}
SHOWN_STEPS = (1, 10, 50, 100, 200, 500, 1000)
STANDARD_ERRORS = 5.0


def require_torch():
    """The torch module; InputError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise InputError("--live needs PyTorch: pip install torch") from error
    return torch


@dataclasses.dataclass
class Pair:
    """The same model twice: `theirs` in PyTorch, ours as configuration, layout and parameters."""

    config: LanguageConfig
    theirs: Any
    params: dict
    rotary: tuple[np.ndarray, np.ndarray]  # of LENGTH + 1 positions, ours, for both

    def to_theirs(self, tree) -> dict[str, np.ndarray]:
        """A tree like our parameters, by their names."""
        return split_all(reference.layout(self.config), self.config, tree)

    def to_ours(self, tensors: Mapping[str, np.ndarray]) -> dict:
        """Tensors by their names, as a tree like our parameters."""
        return join_all(reference.layout(self.config), self.config, tensors)

    def their_rotary(self, length: int):
        import torch

        return tuple(torch.from_numpy(table[:length]) for table in self.rotary)


def make_pair(residual: str, dtype: str, seed: int) -> Pair:
    """Their initial weights with every gain moved, so that a gain in the wrong place shows."""
    torch = require_torch()
    from siamese_jax.interop.torch_model import TorchLanguageModel

    config = dataclasses.replace(MODELS[residual], dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    theirs = TorchLanguageModel(reference.reference_config(config), two_stream=residual == "siamese_hybrid")
    theirs.initialize("mitchell", 0.02, generator)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    weights = {name: weight.numpy().copy() for name, weight in theirs.state_dict().items()}
    theirs = theirs.to(getattr(torch, dtype))
    tables = rotary_tables(jnp.arange(LENGTH + 1), config.key_dim, config.rope_theta)
    pair = Pair(config, theirs, {}, tuple(np.array(table) for table in tables))
    pair.params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), pair.to_ours(weights))
    return pair


def make_batches(steps: int, seed: int, vocab_size: int) -> np.ndarray:
    """[steps, B, L + 1] tokens with something to learn: each follows the one before it, or is drawn anew."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab_size, (steps, BATCH, LENGTH + 1))
    follows = random.random(tokens.shape) < 0.7
    for i in range(1, LENGTH + 1):
        tokens[..., i] = np.where(follows[..., i], (3 * tokens[..., i - 1] + 1) % vocab_size, tokens[..., i])
    return tokens


def training_config(steps: int):
    """(optimizer, schedule) of the training run, as parts of a configuration."""
    config = base_config()
    config.optimizer.clip_norm = CLIP
    config.schedule.update({"peak": PEAK, "warmup_steps": min(WARMUP, steps - 1), "floor": FLOOR})
    return config.optimizer, config.schedule


# ------------------------------------------------------------------------------ the parts


def compare_forward(pair: Pair, tokens: np.ndarray, limits: Mapping[str, float]) -> tuple[list[Row], dict]:
    """(rows of logits, states, loss and gradients; their gradients by their names)."""
    import torch

    theirs, states = pair.theirs, []
    rotary = pair.their_rotary(tokens.shape[1])
    logits = theirs(torch.from_numpy(tokens), rotary, states)
    theirs.zero_grad()
    loss = theirs.loss(torch.from_numpy(tokens), rotary)
    loss.backward()
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in theirs.named_parameters()}
    ours = language_outputs(pair.config, pair.params, jnp.asarray(tokens, jnp.int32), pair.rotary)
    rows = [
        difference("logits", ours["logits"], logits.detach(), "abs", limits["output"]),
        difference("loss", ours["loss"], loss.detach(), "abs", limits["output"]),
    ]
    for i, streams in enumerate(states):
        for short, stream in zip("xy", streams, strict=False):
            name = f"{short}_{i}"
            row = difference(f"state/{name}", ours["states"][name], stream.detach(), "abs", limits["output"])
            rows.append(row)
    our_gradients = pair.to_theirs(ours["gradients"])
    rows += [
        difference(f"grad/{name}", our_gradients[name], gradient, "rel", limits["part"])
        for name, gradient in gradients.items()
    ]
    return rows, gradients


def compare_clipping(pair: Pair, gradients: Mapping[str, np.ndarray], limits: Mapping[str, float]) -> list[Row]:
    """Their gradients, made large and clipped by both; and the one known difference by name."""
    import torch

    large = {name: 100 * gradient for name, gradient in gradients.items()}
    ours, _ = optax.clip_by_global_norm(CLIP).update(pair.to_ours(large), optax.EmptyState())
    ours = pair.to_theirs(ours)
    norm = optax.tree.norm(pair.to_ours(large))
    their_norm, clipped = clip_exactly([torch.from_numpy(gradient) for gradient in large.values()])
    stock = [torch.nn.Parameter(torch.from_numpy(gradient)) for gradient in large.values()]
    for parameter in stock:
        parameter.grad = parameter.data.clone()
    torch.nn.utils.clip_grad_norm_(stock, CLIP)
    flat = np.concatenate([ours[name].ravel() for name in large])
    exact = np.concatenate([gradient.numpy().ravel() for gradient in clipped])
    torchs = np.concatenate([parameter.grad.numpy().ravel() for parameter in stock])
    allowed = 1e-6 / float(their_norm) + limits["part"]
    return [
        difference("gradient norm", norm, their_norm, "rel", limits["part"]),
        difference("clipped gradients", flat, exact, "rel", limits["part"]),
        difference(
            "clipped by clip_grad_norm_", flat, torchs, "rel", allowed,
            "deliberate: PyTorch divides by norm + 1e-6, we by the norm",
        ),
    ]  # fmt: skip


def clip_exactly(gradients: Sequence) -> tuple[Any, list]:
    """(global norm, gradients times min(1, CLIP / norm))."""
    import torch

    norm = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum().sqrt()
    return norm, [gradient * torch.clamp(CLIP / norm, max=1.0) for gradient in gradients]


def their_learning_rate(k: int, steps: int, warmup: int) -> float:
    """OLMo's rate of update k = 1 .. steps: linear warm-up, then a cosine to FLOOR times the peak."""
    if k < warmup:
        return PEAK * k / warmup
    done = (k - warmup) / (steps - warmup)
    return PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def compare_schedule(steps: int, limits: Mapping[str, float]) -> list[Row]:
    """The learning rate of every update."""
    _, config = training_config(steps)
    schedule = make_schedule(config, steps)
    ours = [float(schedule(jnp.asarray(count, jnp.int32))) for count in range(steps)]
    theirs = [their_learning_rate(k, steps, config.warmup_steps) for k in range(1, steps + 1)]
    return [difference("learning rates", ours, theirs, "rel", limits["part"], f"{steps} updates")]


def compare_decay_groups(pair: Pair) -> list[Row]:
    """Which parameters decay: 0 where both agree, 1 where they do not."""
    rows = []
    for decay_embedding in (True, False):
        config, _ = training_config(2)
        config.decay_embedding = decay_embedding
        mask = weight_decay_mask(config, pair.params)
        ours = pair.to_theirs(
            jax.tree.map(lambda leaf, decays: np.full(leaf.shape, float(decays)), pair.params, mask)
        )
        decayed = pair.theirs.decayed(decay_embedding)
        other = [name for name, tensor in ours.items() if not np.all(tensor == float(name in decayed))]
        name = f"decay groups, embedding {'decayed' if decay_embedding else 'not decayed'}"
        note = f"not alike: {', '.join(other)}" if other else f"{len(decayed)} of {len(ours)} tensors decay"
        rows.append(Row(name, float(bool(other)), float(bool(other)), "abs", 0.0, note))
    return rows


def make_torch_optimizer(theirs):
    """torch.optim.AdamW with the decay groups of OLMo."""
    import torch

    config, _ = training_config(2)
    decayed = theirs.decayed(config.decay_embedding)
    named = dict(theirs.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(config.b1, config.b2), eps=config.eps)


def compare_update(pair: Pair, gradients: Mapping[str, np.ndarray], limits: Mapping[str, float]) -> list[Row]:
    """Three AdamW updates, without clipping, from the same gradients: theirs, and theirs halved."""
    import torch

    config, schedule_config = training_config(3)
    config.clip_norm = 0.0
    optimizer = make_optimizer(config, make_schedule(schedule_config, 3), pair.params)
    params, state = pair.params, optimizer.init(pair.params)
    theirs = copy.deepcopy(pair.theirs)
    torch_optimizer = make_torch_optimizer(theirs)
    for k, factor in enumerate((1.0, 0.5, -1.0), start=1):
        scaled = {name: factor * gradient for name, gradient in gradients.items()}
        updates, state = optimizer.update(pair.to_ours(scaled), state, params)
        params = optax.apply_updates(params, updates)
        for name, parameter in theirs.named_parameters():
            parameter.grad = torch.from_numpy(scaled[name])
        for group in torch_optimizer.param_groups:
            group["lr"] = their_learning_rate(k, 3, schedule_config.warmup_steps)
        torch_optimizer.step()
    ours = pair.to_theirs(params)
    rows = [
        difference(name, ours[name], parameter.detach(), "rel", limits["part"])
        for name, parameter in theirs.named_parameters()
    ]
    worst = max(rows, key=lambda row: row.badness)
    return [dataclasses.replace(worst, name="three AdamW updates", note=f"worst in {worst.name}")]


# ------------------------------------------------------------------------------ the training run


def train_ours(pair: Pair, batches: np.ndarray) -> tuple[list[float], dict[str, np.ndarray]]:
    """(loss at every update, parameters at the end by their names) of the step that training compiles."""
    config, schedule_config = training_config(len(batches))
    schedule = make_schedule(schedule_config, len(batches))
    optimizer = make_optimizer(config, schedule, pair.params)
    step = jax.jit(make_train_step(language_loss(LanguageModel(pair.config), 0.0), optimizer, schedule))
    key = jax.random.key_data(jax.random.key(0))
    state = TrainState(jnp.zeros((), jnp.int32), pair.params, optimizer.init(pair.params), key)
    weights, losses = jnp.ones((BATCH, LENGTH), pair.config.dtype), []
    for tokens in tqdm(batches, desc="JAX", unit="update", delay=2, leave=False, dynamic_ncols=True):
        batch = {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:]), "weights": weights}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, pair.to_theirs(state.params)


def train_theirs(
    pair: Pair, batches: np.ndarray, stock_clipping: bool
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same in PyTorch, clipped exactly or by torch.nn.utils.clip_grad_norm_."""
    import torch

    _, schedule_config = training_config(len(batches))
    theirs = copy.deepcopy(pair.theirs)
    optimizer = make_torch_optimizer(theirs)
    parameters, rotary, losses = list(theirs.parameters()), pair.their_rotary(LENGTH + 1), []
    progress = tqdm(batches, desc="PyTorch", unit="update", delay=2, leave=False, dynamic_ncols=True)
    for k, tokens in enumerate(progress, start=1):
        optimizer.zero_grad()
        loss = theirs.loss(torch.from_numpy(tokens), rotary)
        loss.backward()
        if stock_clipping:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        else:
            _, clipped = clip_exactly([parameter.grad for parameter in parameters])
            for parameter, gradient in zip(parameters, clipped, strict=True):
                parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = their_learning_rate(k, len(batches), schedule_config.warmup_steps)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}


def compare_training(
    pair: Pair, batches: np.ndarray, limits: Mapping[str, float]
) -> tuple[list[Row], dict[str, Any]]:
    """(rows, curves) of a training run."""
    ours, our_final = train_ours(pair, batches)
    theirs, their_final = train_theirs(pair, batches, stock_clipping=False)
    stock, _ = train_theirs(pair, batches, stock_clipping=True)
    finals = [
        difference(name, our_final[name], final, "rel", limits["final"]) for name, final in their_final.items()
    ]
    worst = max(finals, key=lambda row: row.badness)
    relative = np.abs(np.subtract(ours, theirs)) / np.abs(theirs)
    rows = [
        _curve_row(f"loss of {len(ours)} updates", ours, theirs, limits["curve"]),
        dataclasses.replace(worst, name="parameters at the end", note=f"worst in {worst.name}"),
        _curve_row("the same with clip_grad_norm_", ours, stock, max(limits["curve"], 1e-6)),
    ]
    return rows, {"ours": ours, "theirs": theirs, "relative": relative.tolist()}


def _curve_row(name: str, ours: Sequence[float], theirs: Sequence[float], limit: float) -> Row:
    """Two loss curves, update by update, and how their difference grows."""
    absolute = np.abs(np.subtract(ours, theirs))
    relative = absolute / np.abs(theirs)
    growth = ", ".join(f"{k}: {np.max(relative[:k]):.1e}" for k in SHOWN_STEPS if k <= len(relative))
    return Row(name, float(np.max(absolute)), float(np.max(relative)), "rel", limit, f"up to update {growth}")


def compare_bfloat16(pair: Pair, tokens: np.ndarray, exact: Row) -> list[Row]:
    """Matmuls in bfloat16 on both sides, streams in float32; `exact` is the loss's row in `pair`'s type.

    A loss averages rounding away. Only what bfloat16 changes of the logits tells whether both compute in it.
    """
    import torch

    config = dataclasses.replace(pair.config, dtype="bfloat16", stream_dtype="float32")
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), pair.params)
    inputs, targets = jnp.asarray(tokens[:, :-1], jnp.int32), jnp.asarray(tokens[:, 1:], jnp.int32)
    rotary = tuple(jnp.asarray(table[:LENGTH], jnp.float32) for table in pair.rotary)
    losses, _ = LanguageModel(config).apply({"params": params}, inputs, targets, method="losses", rotary=rotary)
    narrow, wide = (
        np.asarray(LanguageModel(each).apply({"params": params}, inputs, rotary=rotary), np.float64)
        for each in (config, dataclasses.replace(config, dtype="float32"))
    )
    theirs, their_tokens = copy.deepcopy(pair.theirs).float(), torch.from_numpy(tokens)
    with torch.no_grad():
        their_wide = theirs(their_tokens[:, :-1], pair.their_rotary(LENGTH)).double().numpy()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            their_loss = theirs.loss(their_tokens, pair.their_rotary(LENGTH + 1))
            their_narrow = theirs(their_tokens[:, :-1], pair.their_rotary(LENGTH)).double().numpy()
    rounding, their_rounding = (np.sqrt(np.mean(np.square(x))) for x in (narrow - wide, their_narrow - their_wide))
    return [
        difference(
            "loss in bfloat16", losses.mean(), their_loss, "rel", 2e-3,
            f"in {pair.config.dtype} the difference is {exact.max_rel:.1e}",
        ),
        difference(
            "rounding of logits in bfloat16", rounding, their_rounding, "rel", 0.5,
            f"root mean square of what bfloat16 changes: {rounding:.1e} here, {their_rounding:.1e} there",
        ),
    ]  # fmt: skip


# ------------------------------------------------------------------------------ initialisation


def truncated_std() -> float:
    """Standard deviation of a unit normal cut at +-3: sqrt(1 - 2 a phi(a) / (2 Phi(a) - 1)) with a = 3."""
    a = TRUNCATION
    density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * a * density / math.erf(a / math.sqrt(2)))


def expected_stds(config: LanguageConfig) -> dict[str, float]:
    """sigma of every tensor by its PyTorch name; 0 for gains, which are 1."""
    stds = {}
    d, n = config.width, config.num_layers
    for name in reference.layout(config).tensors():
        if not name.endswith("weight") or "norm" in name or ".ln_" in name:
            stds[name] = 0.0
            continue
        block = int(name.split(".")[2]) if ".blocks." in name else None
        fan = config.mlp_hidden if block is not None and name.endswith("ff_out.weight") else d
        is_out = block is not None and name.endswith(("attn_out.weight", "ff_out.weight"))
        is_head = block is None and name.endswith("ff_out.weight")
        if config.init == "mitchell":
            stds[name] = 1 / math.sqrt(2 * fan * (block + 1)) if is_out else 1 / math.sqrt(d)
        elif config.init == "normal":
            stds[name] = config.init_std
        else:
            out, head = config.init_std / math.sqrt(2 * n), 1 / math.sqrt(d)
            stds[name] = out if is_out else head if is_head else config.init_std
    return stds


def compare_initialisation(seeds: int = 4, say: Callable[[str], None] = print) -> list[Row]:
    """Mean, spread and truncation of every weight, ours and theirs, against the formulas; worst first.

    Differences are in standard errors of the sample: a mean is off by sigma / sqrt(n), a spread by about
    sigma / sqrt(2 n). Infinite are a |weight| above 3 sigma and a gain that is not 1.
    """
    torch = require_torch()
    from siamese_jax.interop.torch_model import TorchLanguageModel

    say(f"initialisation: {', '.join(INITIALIZERS)}, {seeds} seeds on both sides")
    rows = []
    make = jax.jit(initial_parameters, static_argnums=0)
    for number, kind in enumerate(INITIALIZERS):
        config = dataclasses.replace(MODELS["siamese_hybrid"], init=kind, width=64, mlp_hidden=96)
        expected = expected_stds(config)
        drawn: dict[str, dict[str, list]] = {"ours": {}, "theirs": {}}
        for seed in range(number * seeds, (number + 1) * seeds):  # others for every initialiser
            ours = split_all(reference.layout(config), config, make(config, jax.random.key(seed)))
            theirs = TorchLanguageModel(reference.reference_config(config), two_stream=True)
            theirs.initialize(kind, config.init_std, torch.Generator().manual_seed(seed))
            sides = {"ours": ours, "theirs": {name: w.numpy() for name, w in theirs.state_dict().items()}}
            for side, tensors in sides.items():
                for name, tensor in tensors.items():
                    drawn[side].setdefault(name, []).append(np.asarray(tensor, np.float64).ravel())
        rows += [
            initial_row(f"{kind}, {side}: {name}", np.concatenate(parts), expected[name])
            for side, tensors in drawn.items()
            for name, parts in tensors.items()
        ]
    return sorted(rows, key=lambda row: -row.badness)


def initial_row(name: str, values: np.ndarray, sigma: float) -> Row:
    """How far a sample is from a normal cut at 3 sigma (sigma = 0: from 1), in standard errors."""
    if sigma == 0:
        off, note = 0.0 if np.all(values == 1) else np.inf, ""
    else:
        largest, std, count = np.max(np.abs(values)) / sigma, sigma * truncated_std(), values.size
        off = max(abs(values.mean()) * math.sqrt(count), abs(values.std() - std) * math.sqrt(2 * count)) / std
        off = off if largest <= TRUNCATION * (1 + 1e-6) else np.inf  # NaN too
        note = (
            f"sigma {sigma:.4f}: mean {values.mean():+.5f}, spread {values.std():.5f}, largest {largest:.3f} sigma"
        )
    return Row(name, float(off), float(off), "abs", STANDARD_ERRORS, note)


# ------------------------------------------------------------------------------ all of it


@contextlib.contextmanager
def _one_torch_thread():
    """More would only fight with XLA's over the cores: the model is tiny."""
    torch = require_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_live(
    residual: str = "siamese_hybrid",
    dtype: str = "float64",
    steps: int = 100,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Every part compared, as a dict that JSON can hold. float64 needs jax_enable_x64."""
    limits = LIMITS[dtype]
    with jax.default_matmul_precision("highest"), _one_torch_thread():
        pair = make_pair(residual, dtype, seed)
        batches = make_batches(steps, seed, pair.config.vocab_size)
        say(f"{residual} in {dtype}: forward, gradients, optimiser, schedule")
        rows, gradients = compare_forward(pair, batches[0], limits)
        rows.sort(key=lambda row: -row.badness)
        loss = next(row for row in rows if row.name == "loss")
        rows += compare_clipping(pair, gradients, limits)
        rows += compare_schedule(steps, limits)
        rows += compare_decay_groups(pair)
        rows += compare_update(pair, gradients, limits)
        rows += compare_bfloat16(pair, batches[0], loss)
        say(f"{residual} in {dtype}: {steps} AdamW updates on both sides")
        trained, curves = compare_training(pair, batches, limits)
        rows += trained
    return {
        "residual": residual, "dtype": dtype, "steps": steps, "seed": seed, "ok": all(row.ok for row in rows),
        "rows": [row.plain() for row in rows], "curves": curves,
    }  # fmt: skip


def format_live(result: Mapping[str, Any], most: int = 12) -> str:
    """The table: of forward and gradients the `most` worst and all that fail, of everything else all."""
    many = [row for row in result["rows"] if row["name"].startswith(("grad/", "state/"))]
    hidden = {row["name"] for row in many[most:] if row["ok"]}
    rows = [row for row in result["rows"] if row["name"] not in hidden]
    failed = sum(not row["ok"] for row in result["rows"])
    total = len(result["rows"])
    lines = [f"{result['residual']} in {result['dtype']}, seed {result['seed']}", format_rows(rows)]
    if hidden:
        lines.append(f"  and {len(hidden)} streams and gradients that differ less")
    lines.append(f"  all {total} agree" if not failed else f"  {failed} of {total} FAIL")
    return "\n".join(lines)


def format_initialisation(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table: of every initialiser and side the worst weight, and all that fail."""
    shown: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        group = row["name"].partition(":")[0]
        if group not in shown or not row["ok"]:
            shown[group if group not in shown else row["name"]] = row
    title = f"initialisation, in standard errors of the sample: the worst of {len(rows)} weights and gains"
    return f"{title}\n{format_rows(list(shown.values()))}"


def plot_live(results: Sequence[Mapping[str, Any]], path) -> None:
    """Loss curves of both sides, and their relative difference, one column a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(results), figsize=(4.2 * len(results), 6), squeeze=False, sharex=True, layout="constrained"
    )
    for (above, below), result in zip(axes.T, results, strict=True):
        curves = result["curves"]
        updates = np.arange(1, len(curves["ours"]) + 1)
        above.plot(updates, curves["theirs"], color="tab:orange", linewidth=3.5, alpha=0.6, label="PyTorch")
        above.plot(updates, curves["ours"], color="tab:blue", linewidth=1, label="JAX")
        above.set(title=f"{result['residual']}, {result['dtype']}", ylabel="loss [nats per token]")
        above.legend()
        # Zero has no logarithm: equal losses are drawn at the bottom.
        floor = 1e-17 if result["dtype"] == "float64" else 1e-8
        limit = LIMITS[result["dtype"]]["curve"]
        below.semilogy(updates, np.maximum(curves["relative"], floor), color="tab:blue", linewidth=1)
        below.axhline(limit, color="tab:red", linestyle="--", linewidth=1, label=f"limit {limit:g}")
        below.set(xlabel="AdamW updates", ylabel="relative difference of the loss", ylim=(floor / 2, 10 * limit))
        below.legend()
        below.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
