"""Every residual scheme against its published equation, written down again in plain numpy.

Outputs are compared directly, gradients by central differences of the numpy version. Nothing of
siamese_jax.residual.functional is used here.
"""

import ast
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.residual import known_schemes, make_segments, resolve_options, scheme_options

EPSILON = 1e-5  # the default of RMSNorm
SCALES = {
    "layer2": lambda i, k: 1 / np.sqrt(2 * (i + 1)),
    "layer": lambda i, k: 1 / np.sqrt(i + 1),
    "subblock": lambda i, k: 1 / np.sqrt(2 * i + k + 1),
    "none": lambda i, k: 1.0,
}
# Where the hybrid schemes normalise, unless told otherwise.
PLACES = {
    "attn_norm": False,
    "attn_residual_after_norm": False,
    "ffn_norm": True,
    "ffn_residual_after_norm": True,
}


def rms(h, g):
    return g * h / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + EPSILON)


def of_layer(overrides, i):
    """The options that one layer alone has."""
    rows = ast.literal_eval(overrides).items()
    return dict(pair for layers, row in rows if i in np.atleast_1d(layers) for pair in row.items())


class Equations:
    """The published equations, one method a scheme; `g(name, i)` is the gain of a norm of layer i."""

    def __init__(self, lab, g):
        self.N, self.attn, self.mlp, self.g = lab.num_layers, lab.attend, lab.feed, g

    def pre(self, x):
        for i in range(self.N):
            x = self.pre_layer(x, i)
        return rms(x, self.g("final"))

    def pre_layer(self, x, i):
        x = x + self.attn(rms(x, self.g("attention_norm", i)))
        return x + self.mlp(rms(x, self.g("mlp_norm", i)))

    def post(self, x):
        for i in range(self.N):
            x = self.post_layer(x, i)
        return x

    def post_layer(self, x, i, alpha=1.0):
        x = rms(alpha * x + self.attn(x), self.g("attention_norm", i))
        return rms(alpha * x + self.mlp(x), self.g("mlp_norm", i))

    def deepnorm(self, x):
        for i in range(self.N):
            x = self.post_layer(x, i, alpha=np.sqrt(np.sqrt(2 * self.N)))
        return x

    def resi_dual(self, h):
        x, r = h, h
        for i in range(self.N):
            for f, name in ((self.attn, "attention_norm"), (self.mlp, "mlp_norm")):
                update = f(x)
                x, r = rms(x + update, self.g(name, i)), r + update
        return x + rms(r, self.g("final_pre"))

    def hybrid(self, x, overrides="{}", **options):
        for i in range(self.N):
            o = PLACES | options | of_layer(overrides, i)
            read = rms(x, self.g("attention_norm", i)) if o["attn_norm"] else x
            y = (read if o["attn_residual_after_norm"] else x) + self.attn(read)
            read = rms(y, self.g("mlp_norm", i)) if o["ffn_norm"] else y
            x = (read if o["ffn_residual_after_norm"] else y) + self.mlp(read)
        return rms(x, self.g("final"))

    def hybrid_star(self, x):
        y = x + self.attn(rms(x, self.g("attention_norm", 0)))
        x = y + self.mlp(rms(y, self.g("mlp_norm", 0)))
        for i in range(1, self.N):
            z = rms(x + self.attn(x), self.g("mlp_norm", i))
            x = z + self.mlp(z)
        return rms(x, self.g("final"))

    def mix(self, x, post_fraction=0.25):
        num_post = int(np.floor(post_fraction * self.N))
        for i in range(self.N):
            x = (self.post_layer if i < num_post else self.pre_layer)(x, i)
        return rms(x, self.g("final")) if num_post < self.N else x

    def peri(self, x, embedding_norm=True):
        x = rms(x, self.g("embedding")) if embedding_norm else x
        for i in range(self.N):
            x = x + rms(self.attn(rms(x, self.g("attention_norm", i))), self.g("attention_out_norm", i))
            x = x + rms(self.mlp(rms(x, self.g("mlp_norm", i))), self.g("mlp_out_norm", i))
        return rms(x, self.g("final"))

    def span(self, x):
        for i in range(self.N):
            y = rms(x + self.attn(x), self.g("attention_norm", i))
            x = rms(x + self.mlp(y), self.g("mlp_norm", i))
        return x

    def scaled(self, x):
        for i in range(self.N):
            x = x + self.attn(rms(x, self.g("attention_norm", i)) / np.sqrt(i + 1))
            x = x + self.mlp(rms(x, self.g("mlp_norm", i)) / np.sqrt(i + 1))
        return rms(x, self.g("final"))

    def reordered(self, x):
        for i in range(self.N):
            x = x + rms(self.attn(x), self.g("attention_norm", i))
            x = x + rms(self.mlp(x), self.g("mlp_norm", i))
        return rms(x, self.g("final"))

    def siamese(self, h, depth_scale="layer2", input_norm=True, final_norm=True, post_norm="read"):
        x, y = h, h
        for i in range(self.N):
            for k, (f, name) in enumerate(((self.attn, "attention"), (self.mlp, "mlp"))):
                if post_norm == "read":
                    x = rms(x, self.g(f"{name}_post", i))
                read = x + rms(y, self.g(f"{name}_pre", i))
                if input_norm:
                    read = rms(read, self.g(f"{name}_input", i))
                update = f(read)
                x, y = x + SCALES[depth_scale](i, k) * update, y + update
                if post_norm == "write":
                    x = rms(x, self.g(f"{name}_post", i))
        if post_norm == "read":
            x = rms(x, self.g("final_post"))
        out = x + rms(y, self.g("final_pre"))
        return rms(out, self.g("final")) if final_norm else out

    def siamese_hybrid(self, h, overrides="{}", final_norm=True, **options):
        x, y = h, h
        for i in range(self.N):
            o = PLACES | {"depth_scale": "layer2", "input_norm": True} | options | of_layer(overrides, i)
            scale = SCALES[o["depth_scale"]]
            mixed = rms(x, self.g("attention_post", i)) if o["attn_norm"] else self.g("attention_post", i) * x
            update = self.attn(mixed + rms(y, self.g("attention_pre", i)))
            x = mixed if o["attn_norm"] and o["attn_residual_after_norm"] else x
            x, y = x + scale(i, 0) * update, y + update
            normed = rms(x, self.g("mlp_post", i)) if o["ffn_norm"] else x
            read = normed + rms(y, self.g("mlp_pre", i))
            update = self.mlp(rms(read, self.g("mlp_input", i)) if o["input_norm"] else read)
            x = normed if o["ffn_residual_after_norm"] else x
            x, y = x + scale(i, 1) * update, y + update
        out = rms(x, self.g("final_post")) + rms(y, self.g("final_pre"))
        return rms(out, self.g("final")) if final_norm else out


class Gains:
    """Looks up a gain by the norm's name and layer, and remembers what was read."""

    def __init__(self, flat):
        self.flat, self.read = flat, set()

    def __call__(self, name, layer=None):
        top = f"residual/{name}" if layer is None else f"layer_{layer}/residual/{name}"
        (path,) = {f"{top}/scale", f"{top}/gain"} & self.flat.keys()
        self.read.add(path)
        return self.flat[path]


def every(scheme, *names):
    """All combinations of some boolean options."""
    values = itertools.product((False, True), repeat=len(names))
    return [(scheme, dict(zip(names, row, strict=True))) for row in values]


def cases():
    plain = [(scheme, {}) for scheme in known_schemes()]
    norms = ("attn_norm", "attn_residual_after_norm", "ffn_norm", "ffn_residual_after_norm")
    ends = ("input_norm", "final_norm")
    scales = [(scheme, {"depth_scale": kind}) for scheme in ("siamese", "siamese_hybrid") for kind in SCALES]
    siamese = [
        ("siamese", options | {"post_norm": when})
        for _, options in every("siamese", *ends)
        for when in ("read", "write")
    ]
    mixes = [("mix", {"post_fraction": a}) for a in (0.0, 0.25, 0.34, 0.7, 1)]
    rest = [*every("peri", "embedding_norm"), *every("hybrid", *norms), *every("siamese_hybrid", *norms)]
    star = "{0: {'attn_norm': True, 'ffn_residual_after_norm': False}}"
    own = "{1: {'ffn_norm': False}, (0, 2): {'attn_norm': True, 'attn_residual_after_norm': True}}"
    deep = (
        "siamese_hybrid",
        {"overrides": "{1: {'depth_scale': 'none', 'input_norm': False}}", "final_norm": False},
    )
    overrides = [(scheme, {"overrides": text}) for scheme in ("hybrid", "siamese_hybrid") for text in (star, own)]
    return plain + scales + siamese + mixes + rest + every("siamese_hybrid", *ends) + [*overrides, deep]


def name_of(case):
    return "-".join([case[0], *(f"{option}={value}" for option, value in case[1].items())])


@pytest.mark.parametrize(("scheme", "options"), cases(), ids=map(name_of, cases()))
def test_scheme_is_its_equation(scheme, options, lab, embedding, wide):
    chain, flat = lab.make_chain(scheme, **options)
    weight = np.random.default_rng(3).normal(size=embedding.shape)

    def expected(flat):
        return getattr(Equations(lab, Gains(flat)), scheme)(flat["input"], **options)

    def objective(flat):
        out = lab.apply(chain, {k: v for k, v in flat.items() if k != "input"}, flat["input"])
        return jnp.sum(out * weight), out

    flat["input"] = embedding
    gradient, out = jax.grad(objective, has_aux=True)(jax.tree.map(jnp.asarray, flat))
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected(flat), rtol=1e-11, atol=1e-12)

    random = np.random.default_rng(4)
    for path, leaf in flat.items():
        direction = random.normal(size=leaf.shape)
        at = [np.sum(expected(flat | {path: leaf + step * 1e-4 * direction}) * weight) for step in (-2, -1, 1, 2)]
        slope = np.dot(at, [1, -8, 8, -1]) / 12e-4
        np.testing.assert_allclose(np.sum(direction * gradient[path]), slope, rtol=1e-7, atol=1e-8, err_msg=path)


@pytest.mark.parametrize(("scheme", "options"), cases(), ids=map(name_of, cases()))
def test_a_scheme_has_the_parameters_of_its_equation_and_no_others(scheme, options, lab, embedding):
    _, flat = lab.make_chain(scheme, **options)
    gains = Gains(flat)
    getattr(Equations(lab, gains), scheme)(embedding, **options)
    assert gains.read == flat.keys()


def test_every_value_of_every_option_is_tested():
    tested = {}
    for scheme, options in cases():
        for option, value in options.items():
            tested.setdefault((scheme, option), set()).add(value)
    for scheme in known_schemes():
        for option, (kind, default) in scheme_options(scheme).items():
            choices = {False, True} if kind is bool else set(typing.get_args(kind)) or {default, 1}
            assert choices <= tested[scheme, option], (scheme, option)


def test_overrides_make_a_segment_of_every_run_of_equal_layers():
    def counts(text, options=None):
        return [count for _, count in make_segments("hybrid", 6, options=options, overrides=text)]

    assert counts("") == counts("{}") == counts("{0: {'attn_norm': False}}") == [6]
    assert counts("{0: {'attn_norm': True}}") == [1, 5]
    assert counts("{(0, 1, 5): {'attn_norm': True}, 1: {'ffn_norm': False}}") == [1, 1, 3, 1]
    assert counts("{0: {'attn_norm': None}}", {"attn_norm": True}) == [6]
    star = make_segments("hybrid", 6, overrides="{0: {'attn_norm': True, 'ffn_residual_after_norm': False}}")
    for (ours, count), (named, named_count) in zip(star, make_segments("hybrid_star", 6), strict=True):
        assert count == named_count
        assert resolve_options("hybrid", dict(named.options)) == dict(ours.options)


@pytest.mark.parametrize(
    ("scheme", "text", "words"),
    [
        ("hybrid", "0:attn_norm", ("'0:attn_norm'", "{0: {'option': value}")),
        ("hybrid", "[1]", ("'[1]'",)),
        ("hybrid", "{0: 5}", ("{0: 5}",)),
        ("hybrid", "{6: {'attn_norm': True}}", ("layer 6", "0 to 5")),
        ("hybrid", "{True: {'attn_norm': True}}", ("layer True",)),
        ("hybrid", "{0: {'atn_norm': True}}", ("'atn_norm'", "attn_norm")),
        ("hybrid", "{0: {'attn_norm': 'yes'}}", ("'yes'", "bool")),
        ("siamese_hybrid", "{0: {'final_norm': False}}", ("final_norm", "model.residual_options")),
        ("siamese", "{0: {'post_norm': 'write'}}", ("post_norm", "model.residual_options")),
        ("mix", "{0: {'post_fraction': 0.5}}", ("composite", "'mix'")),
    ],
)
def test_wrong_overrides_end_in_one_line(scheme, text, words):
    with pytest.raises(InputError) as caught:
        make_segments(scheme, 6, overrides=text)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_deepnorm_starts_its_branches_smaller():
    ((make_residual, count),) = make_segments("deepnorm", 12)
    assert count == 12
    assert make_residual.scheme.branch_gain(12) == pytest.approx((8 * 12) ** -0.25)
    ((make_residual, _),) = make_segments("siamese", 12)
    assert make_residual.scheme.branch_gain(12) == 1.0


@pytest.mark.parametrize(
    ("fraction", "num_layers", "counts"),
    [(0.25, 16, (4, 12)), (0.25, 3, (3,)), (0.29, 100, (29, 71)), (0, 4, (4,)), (1.0, 4, (4,))],
)
def test_mix_takes_the_floor_of_its_fraction(fraction, num_layers, counts):
    segments = make_segments("mix", num_layers, options={"post_fraction": fraction})
    assert tuple(count for _, count in segments) == counts


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_mix_refuses_a_fraction_that_is_none(fraction):
    with pytest.raises(InputError, match=rf"post_fraction.*{fraction}.*0 to 1"):
        make_segments("mix", 4, options={"post_fraction": fraction})


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(InputError) as caught:
        make_segments("siamese_hibrid", 2)
    message = str(caught.value)
    assert "'siamese_hibrid'" in message and "nearest: siamese_hybrid" in message
    assert all(scheme in message for scheme in known_schemes())


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(InputError) as caught:
        resolve_options("siamese", {"depth_scaling": "layer"})
    assert all(option in str(caught.value) for option in ("depth_scaling", *scheme_options("siamese")))
    with pytest.raises(InputError, match="it has none"):
        resolve_options("pre", {"final_norm": True})


@pytest.mark.parametrize(
    ("scheme", "option", "value", "words"),
    [
        ("siamese", "depth_scale", "sqrt", ("layer2", "layer", "subblock", "none", "'sqrt'")),
        ("siamese", "post_norm", "both", ("read", "write", "'both'")),
        ("siamese_hybrid", "ffn_norm", "yes", ("bool", "'yes'")),
        ("siamese_hybrid", "ffn_norm", 1, ("bool", "1")),
        ("mix", "post_fraction", "half", ("float", "'half'")),
        ("mix", "post_fraction", True, ("float", "True")),
    ],
)
def test_a_wrong_value_of_an_option_says_what_it_may_be(scheme, option, value, words):
    with pytest.raises(InputError) as caught:
        resolve_options(scheme, {option: value})
    assert all(word in str(caught.value) for word in (*words, option, scheme))


def test_options_that_are_none_take_their_defaults():
    resolved = resolve_options("siamese", {"depth_scale": None, "input_norm": False, "post_norm": None})
    assert resolved == {"depth_scale": "layer2", "input_norm": False, "final_norm": True, "post_norm": "read"}
