"""Parameter groups by name, AdamW against numpy, Muon on stacks against single layers, running averages.

N layers, D width, KV key heads, G queries a key head, K head dim, F hidden, V vocabulary.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from siamese_jax.errors import InputError
from siamese_jax.training import optimizer
from siamese_jax.training.optimizer import (
    check_optimizer,
    describe_groups,
    init_ema,
    make_optimizer,
    parameter_groups,
    update_ema,
)

N, D, KV, G, K, F, V = 3, 12, 2, 2, 4, 20, 11
RATE = 0.01

GROUP_OF_LAYER_LEAF = {
    "attention/qkv/kernel": "matrices",
    "attention/qkv/bias": "biases",
    "attention/out/kernel": "matrices",
    "attention/out/bias": "biases",
    "attention/query_norm/scale": "gains",
    "attention/key_norm/scale": "gains",
    "attention/value_norm/scale": "gains",
    "attention/context_norm/scale": "gains",
    "attention/query_norm/bias": "biases",
    "mlp/up/kernel": "matrices",
    "mlp/up/bias": "biases",
    "mlp/down/kernel": "matrices",
    "mlp/down/bias": "biases",
    "residual/post/scale": "gains",
    "residual/post/bias": "biases",
    "residual/mix/gain": "gains",
}
GROUP_OF_TOP_LEAF = {
    "embedding/table": "embedding",
    "head/kernel": "head",
    "residual/final/scale": "gains",
    "residual/final/bias": "biases",
}


def config(**fields):
    return SimpleNamespace(
        **{
            "kind": "adamw",
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "clip_norm": 0.0,
            "decay_embedding": False,
            "muon_momentum": 0.9,
            "ema": 0.0,
            **fields,
        }
    )


def nest(flat):
    tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def flatten(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def layer_shapes(gated=True):
    return {
        "attention/qkv/kernel": (D, KV, G + 2, K),
        "attention/qkv/bias": (KV, G + 2, K),
        "attention/out/kernel": (KV * G * K, D),
        "attention/out/bias": (D,),
        "attention/query_norm/scale": (K,),
        "attention/key_norm/scale": (K,),
        "attention/value_norm/scale": (K,),
        "attention/context_norm/scale": (KV * G * K,),
        "attention/query_norm/bias": (K,),
        "mlp/up/kernel": (D, 2, F) if gated else (D, F),
        "mlp/up/bias": (2, F) if gated else (F,),
        "mlp/down/kernel": (F, D),
        "mlp/down/bias": (D,),
        "residual/post/scale": (D,),
        "residual/post/bias": (D,),
        "residual/mix/gain": (D,),
    }


def model_shapes(prefixes, gated=True):
    """{path: shape}; prefixes is {'layers': N, 'layer_0': None, ..}, None for no layer axis."""
    shapes = {"embedding/table": (V, D), "head/kernel": (D, V)}
    shapes.update({"residual/final/scale": (D,), "residual/final/bias": (D,)})
    for prefix, num in prefixes.items():
        axis = () if num is None else (num,)
        shapes.update({f"{prefix}/{path}": axis + shape for path, shape in layer_shapes(gated).items()})
    return shapes


def random_tree(shapes, seed, scale=1.0):
    draw = np.random.default_rng(seed)
    draws = {path: scale * draw.normal(size=shape) for path, shape in shapes.items()}
    return nest({path: jnp.asarray(value, jnp.float32) for path, value in draws.items()})


LAYOUTS = {
    "scanned": {"layers": N},
    "unrolled": {"layer_0": None, "layer_1": None, "layer_10": None},
    "segments": {"layers_from_0": 1, "layers_from_1": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decay_embedding", [False, True])
def test_groups_and_decay_of_every_path(layout, decay_embedding):
    """With zero gradients AdamW moves exactly the decayed parameters, by rate * decay."""
    shapes = model_shapes(LAYOUTS[layout])
    expected = dict(GROUP_OF_TOP_LEAF)
    for prefix in LAYOUTS[layout]:
        expected.update({f"{prefix}/{path}": group for path, group in GROUP_OF_LAYER_LEAF.items()})
    params = random_tree(shapes, seed=0)
    assert flatten(parameter_groups(params)) == expected

    transform = make_optimizer(config(decay_embedding=decay_embedding), optax.constant_schedule(RATE), params)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda params: transform.update(grads, transform.init(params), params))(params)
    decayed = {"matrices", "head"} | ({"embedding"} if decay_embedding else set())
    params, updates = flatten(params), flatten(updates)
    for path, group in expected.items():
        wanted = -RATE * 0.1 * params[path] if group in decayed else jnp.zeros_like(params[path])
        np.testing.assert_allclose(updates[path], wanted, rtol=1e-6, atol=0, err_msg=path)


@pytest.mark.parametrize("path", ["layers/mlp/gate/kernel", "layers/norm/scale", "kernel", "table/x"])
def test_a_name_without_a_row_is_an_error(path):
    with pytest.raises(InputError, match=f"parameter {path} is matched by no row") as caught:
        parameter_groups(nest({path: jnp.zeros(3)}))
    assert "\n" not in str(caught.value)


def test_a_name_with_two_rows_is_an_error(monkeypatch):
    monkeypatch.setattr(optimizer, "GROUP_RULES", (*optimizer.GROUP_RULES, ("up/kernel", "head")))
    with pytest.raises(InputError, match="layers/mlp/up/kernel is matched by mlp/up/kernel and up/kernel"):
        optimizer.group_of("layers/mlp/up/kernel")


def test_describe_groups():
    shapes = jax.eval_shape(lambda: random_tree(model_shapes({"layers": N}), seed=0))
    matrices = N * (D * KV * (G + 2) * K + KV * G * K * D + D * 2 * F + F * D)
    lines = [line.split() for line in describe_groups(config(kind="muon"), shapes).splitlines()]
    assert lines[0] == ["group", "arrays", "parameters", "weight", "decay", "optimiser"]
    assert lines[1] == ["matrices", "4", f"{matrices:,}", "0.1", "muon"]
    assert lines[2] == ["head", "1", str(D * V), "0.1", "adamw"]
    assert lines[3] == ["embedding", "1", str(D * V), "0", "adamw"]
    assert [line[0] for line in lines[4:]] == ["gains", "biases", "all"]
    total = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert lines[6] == ["all", "20", f"{total:,}"]
    tied = {"embedding": shapes["embedding"]}
    table = describe_groups(config(decay_embedding=True), tied)
    assert table.splitlines()[1].split() == ["embedding", "1", str(D * V), "0.1", "adamw"]
    assert len(table.splitlines()) == 3


def adamw_numpy(params, grads_of_steps, rates, *, b1, b2, eps, decay, clip, decayed):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2, decay times the rate), clipped by the global norm."""
    params = {path: value.astype(np.float64) for path, value in params.items()}
    first, second = ({path: np.zeros_like(value) for path, value in params.items()} for _ in range(2))
    for step, (grads, rate) in enumerate(zip(grads_of_steps, rates, strict=True), start=1):
        norm = np.sqrt(sum(np.sum(grad.astype(np.float64) ** 2) for grad in grads.values()))
        shrink = min(1.0, clip / norm) if clip else 1.0
        for path, grad in grads.items():
            grad = grad.astype(np.float64) * shrink
            first[path] = b1 * first[path] + (1 - b1) * grad
            second[path] = b2 * second[path] + (1 - b2) * grad**2
            move = first[path] / (1 - b1**step) / (np.sqrt(second[path] / (1 - b2**step)) + eps)
            params[path] -= rate * (move + (decay if decayed(path) else 0.0) * params[path])
    return params


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
def test_adamw_equals_numpy(clip):
    shapes = model_shapes({"layers": N})
    params = random_tree(shapes, seed=0)
    # Of very different sizes, so that a gradient clipped or not leaves other second moments behind.
    grads = [random_tree(shapes, seed=1, scale=0.01), random_tree(shapes, seed=2, scale=3.0)]
    rates = [0.01, 0.02]
    fields = config(clip_norm=clip, eps=1e-3)
    transform = make_optimizer(fields, lambda count: jnp.asarray(rates)[count], params)
    state, result = transform.init(params), params
    step = jax.jit(transform.update)
    for grad in grads:
        updates, state = step(grad, state, result)
        result = optax.apply_updates(result, updates)
    expected = adamw_numpy(
        jax.device_get(flatten(params)),
        [jax.device_get(flatten(grad)) for grad in grads],
        rates,
        b1=0.9,
        b2=0.95,
        eps=1e-3,
        decay=0.1,
        clip=clip,
        decayed=lambda path: path.endswith("kernel"),
    )
    for path, value in flatten(result).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("kind", optimizer.KINDS)
def test_state_is_float32_and_keeps_its_types(kind):
    params = random_tree(model_shapes({"layers": N}), seed=0)
    transform = make_optimizer(config(kind=kind, clip_norm=1.0), optax.constant_schedule(RATE), params)
    state = transform.init(params)
    _, after = jax.eval_shape(transform.update, params, state, params)
    types = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert types == {np.dtype("float32"), np.dtype("int32")}
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_half_precision_parameters_are_refused():
    params = nest({"embedding/table": jnp.zeros((V, D), jnp.bfloat16)})
    with pytest.raises(InputError, match="embedding/table is bfloat16"):
        make_optimizer(config(), optax.constant_schedule(RATE), params)


def gradients(params, number):
    return jax.tree.map(lambda leaf: jnp.cos(leaf * (7.0 + number)), params)


def run_muon(params, num_steps=2, **fields):
    """The update of the last of some steps at unmoved parameters."""
    transform = make_optimizer(config(kind="muon", **fields), optax.constant_schedule(RATE), params)
    state, step = transform.init(params), jax.jit(transform.update)
    for number in range(num_steps):
        updates, state = step(gradients(params, number), state, params)
    return flatten(updates)


@pytest.mark.parametrize("gated", [True, False])
def test_muon_on_a_stack_is_muon_on_each_layer(gated):
    kernels = {path: shape for path, shape in layer_shapes(gated).items() if path.endswith("kernel")}
    stack = random_tree({path: (N, *shape) for path, shape in kernels.items()}, seed=3)
    of_stack = run_muon({"layers": stack})
    others = {"layer_1": jax.tree.map(lambda leaf: leaf[1], stack)}
    others["layers_from_2"] = jax.tree.map(lambda leaf: leaf[2:], stack)
    of_others = run_muon(others)
    for path in kernels:
        update = of_stack[f"layers/{path}"]
        np.testing.assert_allclose(update[1], of_others[f"layer_1/{path}"], rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(update[2:], of_others[f"layers_from_2/{path}"], rtol=2e-4, atol=1e-6)


def slices_of(path, layer):
    """The matrices [reduction, output] of one layer that Muon must treat one by one."""
    if path == "attention/qkv/kernel":
        return [layer[:, :, g].reshape(D, KV * K) for g in range(G + 2)]
    if path == "mlp/up/kernel" and layer.ndim == 3:
        return [layer[:, 0], layer[:, 1]]
    return [layer]


@pytest.mark.parametrize("gated", [True, False])
def test_muon_orthogonalises_each_slice_to_the_rms_of_adamw(gated):
    updates = run_muon(random_tree(model_shapes({"layers": N}, gated), seed=4), weight_decay=0.0)
    for path in (path for path in GROUP_OF_LAYER_LEAF if path.endswith("kernel")):
        for layer in np.asarray(updates[f"layers/{path}"]):
            for matrix in slices_of(path, layer):
                scale = RATE * 0.2 * np.sqrt(max(matrix.shape))
                values = np.linalg.svd(matrix, compute_uv=False) / scale
                # Five Newton-Schulz steps with Muon's coefficients end between about 0.7 and 1.2, not at 1.
                assert 0.6 < values.min() and values.max() < 1.25, (path, values)
                assert 0.15 < np.sqrt(np.mean(matrix**2)) / RATE < 0.22, path


def test_muon_equals_optax_on_plain_matrices():
    shapes = {
        path: shape
        for path, shape in layer_shapes(gated=False).items()
        if path in ("attention/out/kernel", "mlp/up/kernel", "mlp/down/kernel")
    }
    params = random_tree({f"layer_0/{path}": shape for path, shape in shapes.items()}, seed=5)
    reference = optax.contrib.muon(RATE, beta=0.9, weight_decay=0.1, consistent_rms=0.2)
    state = reference.init(params)
    for number in range(2):
        expected, state = jax.jit(reference.update)(gradients(params, number), state, params)
    for path, update in run_muon(params).items():
        np.testing.assert_allclose(update, flatten(expected)[path], rtol=1e-4, atol=1e-6, err_msg=path)


def test_muon_leaves_the_rest_to_adamw():
    params = random_tree(model_shapes({"layers": N}), seed=6)
    of_muon = run_muon(params, num_steps=1, clip_norm=1.0)
    transform = make_optimizer(config(clip_norm=1.0), optax.constant_schedule(RATE), params)
    of_adamw, _ = jax.jit(transform.update)(gradients(params, 0), transform.init(params), params)
    of_adamw = flatten(of_adamw)
    for path, group in flatten(parameter_groups(params)).items():
        same = np.allclose(of_muon[path], of_adamw[path], rtol=1e-4, atol=1e-7)
        assert same == (group != "matrices"), path


def test_muon_refuses_a_kernel_of_unknown_shape():
    params = nest({"layers/mlp/down/kernel": jnp.zeros((N, 2, F, D))})
    with pytest.raises(InputError, match=r"layers/mlp/down/kernel of shape \(3, 2, 20, 12\), 3 axes a layer"):
        make_optimizer(config(kind="muon"), optax.constant_schedule(RATE), params)


def test_ema_is_the_weighted_mean_of_all_parameters_seen():
    decay, seen = 0.9, [random_tree({"head/kernel": (D, V)}, seed) for seed in range(4)]
    ema = init_ema(seen[0])
    update = jax.jit(update_ema, static_argnames="decay")
    for number, params in enumerate(seen, start=1):
        ema = update(ema, params, decay=decay)
        weights = decay ** np.arange(number - 1, -1, -1)
        expected = np.average([tree["head"]["kernel"] for tree in seen[:number]], axis=0, weights=weights)
        np.testing.assert_allclose(ema.params["head"]["kernel"], expected, rtol=1e-5, atol=1e-6)
    assert int(ema.count) == 4


def test_ema_has_no_bias_at_the_start_even_for_a_slow_one():
    params = {"head": jnp.full((3,), 5.0)}
    ema = init_ema(params)
    for _ in range(3):
        ema = update_ema(ema, params, 0.99999)
        np.testing.assert_allclose(ema.params["head"], 5.0, rtol=1e-6)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"kind": "adam"}, ["'adam'", "'muon'", "nearest: 'adamw'"]),
        ({"b1": 1.0}, ["optimizer.b1", "1.0"]),
        ({"b2": -0.1}, ["optimizer.b2", "-0.1"]),
        ({"muon_momentum": 1.5}, ["optimizer.muon_momentum", "1.5"]),
        ({"ema": 1.0}, ["optimizer.ema", "1.0"]),
        ({"weight_decay": -0.1}, ["optimizer.weight_decay", "-0.1"]),
        ({"clip_norm": float("nan")}, ["optimizer.clip_norm", "nan"]),
        ({"eps": 0.0}, ["optimizer.eps", "0.0"]),
    ],
)
def test_wrong_config_is_one_line(fields, words):
    with pytest.raises(InputError) as caught:
        check_optimizer(config(**fields))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
