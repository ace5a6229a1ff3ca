"""The reader of compiled programs: on real programs of 8 CPU devices, and on short texts with TPU's spellings.

The texts are trimmed from what libtpu's and XLA's compilers print; every expected number is computed by hand.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from siamese_jax.parallel.flops import program_flops
from siamese_jax.parallel.hlo import parse
from siamese_jax.parallel.program_text import collectives, gathered_shapes, memory_traffic

LAYERS, WIDTH, HIDDEN, BATCH, DEVICES = 3, 64, 128, 32, 8
MATRIX = WIDTH * HIDDEN

REAL = f"""
import json
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from siamese_jax.parallel.flops import program_flops
from siamese_jax.parallel.program_text import collectives, gathered_shapes, memory_traffic

mesh = jax.make_mesh(({DEVICES},), ("fsdp",), axis_types=(AxisType.Auto,))
specs = (P(None, "fsdp"), P(None, None, "fsdp"), P("fsdp"), P())
first, second, rows, whole = (NamedSharding(mesh, spec) for spec in specs)
shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)

def layer(x, w):
    x = x + jnp.tanh(x @ w[0]) @ w[1]
    return jax.lax.with_sharding_constraint(x, rows), None

def loss(w, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

def scatter(x, w):
    whole = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
    out = x @ whole
    return jax.lax.psum_scatter(x.T @ out, "fsdp", scatter_dimension=0, tiled=True)

def report(function, inputs, outputs, *shapes):
    traced = jax.jit(function, in_shardings=inputs, out_shardings=outputs).trace(*shapes)
    compiled = traced.lower().compile()
    text, cost = compiled.as_text(), compiled.cost_analysis()
    return dict(
        collectives=collectives(text), gathered=gathered_shapes(text), traffic=memory_traffic(text),
        flops=program_flops(traced.jaxpr), cost_flops=cost["flops"], cost_bytes=cost["bytes accessed"],
    )

w = (shape({LAYERS}, {WIDTH}, {HIDDEN}), shape({LAYERS}, {HIDDEN}, {WIDTH}))
x = shape({BATCH}, {WIDTH})
manual = jax.shard_map(scatter, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
print(json.dumps(dict(
    layers=report(jax.grad(loss), ((first, second), rows), (first, second), w, x),
    manual=report(manual, (rows, rows), rows, x, shape({WIDTH}, {HIDDEN})),
    product=report(lambda x, a, b: x @ a @ b, (rows, whole, whole), rows, x, *(shape(*a.shape[1:]) for a in w)),
)))
"""


@pytest.fixture(scope="module")
def real():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", REAL], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_scanned_layers_gather_each_matrix_twice(real):
    report = real["layers"]
    gathered = report["collectives"]["all-gather"]
    assert gathered == {"count": 4 * LAYERS, "bytes": 4 * LAYERS * MATRIX * 4}
    shapes = sorted(tuple(dims) for _, dims in report["gathered"])
    assert shapes == [(WIDTH, HIDDEN)] * 2 + [(HIDDEN, WIDTH)] * 2
    sums = [report["collectives"][kind]["bytes"] for kind in ("all-reduce", "reduce-scatter")]
    assert sum(sums) == 2 * LAYERS * MATRIX * 4


def test_arithmetic_of_scanned_layers(real):
    # two products forward, the first again in the backward pass, four for the gradients
    assert real["layers"]["flops"] == 7 * LAYERS * 2 * BATCH * MATRIX


def test_manual_collectives(real):
    report = real["manual"]["collectives"]
    assert report["all-gather"] == {"count": 1, "bytes": MATRIX * 4}
    assert report["reduce-scatter"] == {"count": 1, "bytes": MATRIX * 4}
    assert report["all-reduce"] == {"count": 0, "bytes": 0}
    # every device gathers, then multiplies its rows twice
    assert real["manual"]["flops"] == 2 * 2 * BATCH * MATRIX


def test_agrees_with_the_compilers_estimate(real):
    report = real["product"]
    assert report["flops"] == 2 * 2 * BATCH * MATRIX
    assert report["flops"] / DEVICES == pytest.approx(report["cost_flops"], rel=0.02)
    for name in ("product", "manual"):
        assert real[name]["traffic"] == pytest.approx(real[name]["cost_bytes"], rel=0.5)


def flops(function, *shapes):
    return program_flops(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)))


def test_flops_of_products_and_convolutions():
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5)) == 2 * 2 * 3 * 4 * 5
    convolve = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")  # noqa: E731
    assert flops(convolve, (2, 3, 8, 8), (5, 3, 3, 3)) == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_flops_inside_other_programs():
    one = 2 * 4**3
    matrix = (4, 4)
    square = lambda x: x @ x  # noqa: E731
    assert flops(jax.jit(square), matrix) == one
    assert flops(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0], matrix) == 5 * one
    assert flops(lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, square, x), matrix) == one
    either = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, square, x)  # noqa: E731
    assert flops(either, matrix) == 2 * one
    custom = jax.custom_vjp(square)
    custom.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert flops(custom, matrix) == one
    assert flops(jax.grad(lambda x: custom(x).sum()), matrix) == 3 * one
    remat = jax.checkpoint(lambda x: jnp.sin(x @ x))
    assert flops(jax.grad(lambda x: remat(x).sum()), matrix) == 4 * one


def test_flops_of_a_shard_map_are_those_of_all_devices():
    mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("rows")
    inner = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    assert flops(inner, (8, 16), (16, 32)) == 2 * 8 * 16 * 32


LOOPS = """
HloModule loops, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%inner_body (p.0: (u32[], f32[8,4])) -> (u32[], f32[8,4]) {
  %p.0 = (u32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %i.0 = u32[]{:T(128)} get-tuple-element(%p.0), index=0
  %two = u32[]{:T(128)} constant(2)
  %next.0 = u32[]{:T(128)} add(%i.0, %two)
  %x.0 = f32[8,4]{1,0:T(8,128)} get-tuple-element(%p.0), index=1
  %permuted = f32[8,4]{1,0:T(8,128)} collective-permute(%x.0), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %t.0 = (u32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) tuple(%next.0, %permuted)
}

%inner_condition (p.1: (u32[], f32[8,4])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8)
  %p.1 = (u32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %i.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT, backend_config={"flag_configs":[]}
}

%outer_body (p.2: (s32[], f32[8,4], /*index=2*/u32[])) -> (s32[], f32[8,4], /*index=2*/u32[]) {
  %p.2 = (s32[], f32[8,4]{1,0}, /*index=2*/u32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %x.2 = f32[8,4]{1,0} get-tuple-element(%p.2), index=1
  %start.2 = u32[] get-tuple-element(%p.2), index=2
  %copied = u32[] copy(%start.2)
  %sum.2 = (f32[8,4]{1,0}, bf16[2]{0}) all-reduce(%x.2, %x.2), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %t.2 = (u32[], f32[8,4]{1,0}) tuple(%copied, %x.2)
  %while.2 = (u32[], f32[8,4]{1,0}) while(%t.2), condition=%inner_condition, body=%inner_body
  %y.2 = f32[8,4]{1,0} get-tuple-element(%while.2), index=1
  ROOT %t.3 = (s32[], f32[8,4]{1,0}, u32[]) tuple(%i.2, %y.2, %start.2)
}

%outer_condition (p.3: (s32[], f32[8,4], u32[])) -> pred[] {
  %p.3 = (s32[], f32[8,4]{1,0}, u32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0), metadata={op_name="w{0} (x) -> {"}
  %zero = s32[] constant(0)
  %start = u32[] constant(START)
  %t = (s32[], f32[8,4]{1,0}, u32[]) tuple(%zero, %x, %start)
  %while = (s32[], f32[8,4]{1,0}, u32[]) while((s32[], f32[8,4]{1,0}, u32[]) %t), condition=%outer_condition, \
body=%outer_body, backend_config={"known_trip_count":{"n":"16"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %y = f32[8,4]{1,0} get-tuple-element(%while), index=1
}
"""


@pytest.mark.parametrize(("start", "trips"), [(0, 4), (1, 4), (2, 3), (9, 0)])
def test_loops_multiply(start, trips):
    found = collectives(LOOPS.replace("START", str(start)))
    assert found["collective-permute"] == {"count": 16 * trips, "bytes": 16 * trips * 8 * 4 * 4}
    assert found["all-reduce"] == {"count": 16, "bytes": 16 * (8 * 4 * 4 + 2 * 2)}
    assert found["all-gather"] == {"count": 0, "bytes": 0}


@pytest.mark.parametrize(
    ("compare", "trips"),
    [
        ("compare(%limit, %i.1), direction=GT", 4),
        ("compare(%i.1, %limit), direction=LE", 5),
        ("compare(%i.1, %limit), direction=NE", 4),
        ("fusion(%i.1, %limit), kind=kLoop, calls=%less_fused", 4),
        ('custom-call(%i.1, %limit), custom_call_target="unknown"', 1),
    ],
)
def test_conditions(compare, trips):
    fused = """
%less_fused (l: u32[], r: u32[]) -> pred[] {
  %l = u32[] parameter(0)
  %r = u32[] parameter(1)
  ROOT %lr = pred[] compare(%l, %r), direction=LT
}
"""
    text = LOOPS.replace("START", "0").replace("compare(%i.1, %limit), direction=LT", compare) + fused
    assert collectives(text)["collective-permute"]["count"] == 16 * trips


def test_structure_of_the_text():
    program = parse(LOOPS)
    assert program.entry == "main" and len(program.computations) == 6
    loop = program.computations["main"].instructions["while"]
    assert loop.callees("body") == ["outer_body"] and loop.operands == ("t",)
    assert [(shape.dtype, shape.dims) for shape in loop.results] == [("s32", ()), ("f32", (8, 4)), ("u32", ())]
    assert program.computations["inner_body"].root == "t.0"


KERNEL = """
HloModule one

ENTRY %main (w: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %w = f32[8,4]{1,0} parameter(0)
  %kernel = f32[8,4]{1,0} custom-call(%w), custom_call_target="tpu_custom_call", frontend_attributes={notes={
"xprof_metadata":"{\\"block_q\\": 512, \\"k_layout\\": 1}"
}}, metadata={op_name="jit(step)/while/body"}
  ROOT %t = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%kernel, %w)
}
"""


def test_notes_of_a_kernel_over_several_lines():
    main = parse(KERNEL).computations["main"]
    assert main.root == "t" and list(main.instructions) == ["w", "kernel", "t"]
    assert memory_traffic(KERNEL) == 2 * 128


ASYNC = """
HloModule pairs

%wrapped (w: f32[32,8]) -> f32[4,8] {
  %w = f32[32,8]{1,0} parameter(0)
  ROOT %scattered = f32[4,8]{1,0} reduce-scatter(%w), channel_id=9, dimensions={0}, to_apply=%add
}

%branch_a (a: f32[4,8]) -> f32[32,8] {
  %a = f32[4,8]{1,0} parameter(0)
  ROOT %ag.a = f32[32,8]{1,0} all-gather(%a), channel_id=10, dimensions={0}
}

%branch_b (b: f32[4,8]) -> f32[32,8] {
  %b = f32[4,8]{1,0} parameter(0)
  ROOT %ag.b = f32[32,8]{1,0} broadcast(%b), dimensions={0,1}
}

ENTRY %main (x: f32[4,8], y: bf16[2]) -> f32[32,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = bf16[2]{0} parameter(1)
  %p = s32[] parameter(2)
  %one = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %one.done = f32[32,8]{1,0} all-gather-done(%one)
  %two = ((f32[4,8]{1,0}, bf16[2]{0}), (f32[32,8]{1,0}, bf16[16]{0})) all-gather-start(%x, %y), channel_id=2
  %two.done = (f32[32,8]{1,0}, bf16[16]{0}) all-gather-done(%two)
  %sum = f32[32,8]{1,0} all-reduce-start(%one.done), channel_id=3, to_apply=%add
  %sum.done = f32[32,8]{1,0} all-reduce-done(%sum)
  %moved = (f32[4,8]{1,0}, f32[4,8]{1,0:S(1)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=4
  %moved.done = f32[4,8]{1,0:S(1)} collective-permute-done(%moved)
  %rs = ((f32[32,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%sum.done), calls=%wrapped
  %rs.done = f32[4,8]{1,0} async-done(%rs), calls=%wrapped
  %swapped = (f32[2,8]{1,0}, f32[2,8]{1,0}) all-to-all(%rs.done, %rs.done), channel_id=5
  ROOT %c = f32[32,8]{1,0} conditional(%p, %x, %x), branch_computations={%branch_a, %branch_b}
}
"""


def test_asynchronous_pairs_and_tuples():
    found = collectives(ASYNC)
    assert found["all-gather"] == {"count": 3, "bytes": 1024 + (1024 + 32) + 1024}
    assert found["all-reduce"] == {"count": 1, "bytes": 1024}
    assert found["collective-permute"] == {"count": 1, "bytes": 128}
    assert found["reduce-scatter"] == {"count": 1, "bytes": 1024}
    assert found["all-to-all"] == {"count": 1, "bytes": 128}
    assert sorted(gathered_shapes(ASYNC)) == [("bf16", (16,)), *[("f32", (32, 8))] * 3]


def test_traffic_of_asynchronous_pairs():
    # gathers 128+1024, 132+1056; sum 2048; moved 128 to vector memory; scatter and swap; the dearer branch
    assert memory_traffic(ASYNC) == 1152 + 1188 + 2048 + 128 + 1152 + (128 * 2 + 128) + 1152


CHAIN = """
HloModule chain

%start_fused (s0: bf16[2,4]) -> (bf16[2,4], bf16[32,4], s32[2]) {
  %s0 = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %ag.0 = bf16[32,4]{1,0:T(8,128)(2,1)} all-gather(%s0), channel_id=6, frontend_attributes={chain_id="0"}
  ROOT %c.0 = (bf16[2,4]{1,0}, bf16[32,4]{1,0}, s32[2]{0:S(4)}) custom-call(%ag.0), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (m0: bf16[2,4], m1: bf16[32,4], m2: s32[2], m3: f32[8,8]) -> (f32[8,8], bf16[32,4]) {
  %m3 = f32[8,8]{1,0:T(8,128)} parameter(3)
  %work = f32[8,8]{1,0:T(8,128)} convolution(%m3, %m3), dim_labels=bf_io->bf
  %m0 = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %m1 = bf16[32,4]{1,0:T(8,128)(2,1)} parameter(1)
  %m2 = s32[2]{0:S(4)} parameter(2)
  %ag.1 = bf16[32,4]{1,0:T(8,128)(2,1)} all-gather(%m0), channel_id=6, frontend_attributes={chain_id="0"}
  ROOT %t.1 = (f32[8,8]{1,0}, bf16[2,4]{1,0}, bf16[32,4]{1,0}, bf16[32,4]{1,0}) tuple(%work, %m0, %m1, %ag.1)
}

%done_fused (d0: bf16[2,4], d1: bf16[32,4], d2: s32[2]) -> bf16[32,4] {
  %d0 = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %d1 = bf16[32,4]{1,0:T(8,128)(2,1)} parameter(1)
  %d2 = s32[2]{0:S(4)} parameter(2)
  %ag.2 = bf16[32,4]{1,0:T(8,128)(2,1)} all-gather(%d0), channel_id=6, frontend_attributes={chain_id="0"}
  ROOT %c.2 = bf16[32,4]{1,0} custom-call(%d0, %d1, %ag.2, %d2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.3 (r0: f32[32,4], r1: u32[]) -> f32[2,4] {
  %r0 = f32[32,4]{1,0:T(8,128)} parameter(0)
  %r1 = u32[]{:S(6)} parameter(1)
  %ar.3 = f32[32,4]{1,0:T(8,128)} all-reduce(%r0), channel_id=7, to_apply=%add
  %zero.3 = u32[] constant(0)
  ROOT %ds.3 = f32[2,4]{1,0:T(8,128)} dynamic-slice(%ar.3, %r1, %zero.3), dynamic_slice_sizes={2,4}
}

ENTRY %main (x: bf16[2,4], a: f32[8,8], g: f32[32,4]) -> (bf16[32,4], f32[2,4]) {
  %x = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %a = f32[8,8]{1,0:T(8,128)} parameter(1)
  %g = f32[32,4]{1,0:T(8,128)} parameter(2)
  %i = u32[]{:S(6)} partition-id()
  %start = (bf16[2,4]{1,0}, bf16[32,4]{1,0}, s32[2]{0:S(4)}) fusion(%x), kind=kCustom, calls=%start_fused
  %s.0 = bf16[2,4]{1,0} get-tuple-element(%start), index=0
  %s.1 = bf16[32,4]{1,0} get-tuple-element(%start), index=1
  %s.2 = s32[2]{0:S(4)} get-tuple-element(%start), index=2
  %middle = (f32[8,8]{1,0}, bf16[2,4]{1,0}, bf16[32,4]{1,0}, bf16[32,4]{1,0}) fusion(%s.0, %s.1, %s.2, %a), \
kind=kOutput, calls=%async_collective_fusion.1
  %h.1 = bf16[2,4]{1,0} get-tuple-element(%middle), index=1
  %h.3 = bf16[32,4]{1,0} get-tuple-element(%middle), index=3
  %done = bf16[32,4]{1,0} fusion(%h.1, %h.3, %s.2), kind=kCustom, calls=%done_fused
  %kept = f32[2,4]{1,0:T(8,128)} fusion(%g, %i), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %t = (bf16[32,4]{1,0}, f32[2,4]{1,0}) tuple(%done, %kept)
}
"""


def test_a_gather_spread_over_fusions_counts_once():
    assert collectives(CHAIN)["all-gather"] == {"count": 1, "bytes": 32 * 4 * 2}
    assert gathered_shapes(CHAIN) == [("bf16", (32, 4))]


def test_an_all_reduce_that_keeps_a_slice_is_a_reduce_scatter():
    found = collectives(CHAIN)
    assert found["reduce-scatter"] == {"count": 1, "bytes": 32 * 4 * 4}
    assert found["all-reduce"] == {"count": 0, "bytes": 0}


def test_traffic_of_a_spread_gather():
    # the start reads 16 and writes 256, the middle only its own 256 + 256, the scatter 512 + 32
    assert memory_traffic(CHAIN) == 16 + 256 + 256 + 256 + 512 + 32


MEMORY = """
HloModule memory

%sliced (a0: f32[6,8,4], a1: s32[]) -> f32[8,4] {
  %a0 = f32[6,8,4]{2,1,0} parameter(0)
  %a1 = s32[] parameter(1)
  %z.0 = s32[] constant(0)
  %ds.0 = f32[1,8,4]{2,1,0} dynamic-slice(%a0, %a1, %z.0, %z.0), dynamic_slice_sizes={1,8,4}
  ROOT %b.0 = f32[8,4]{1,0} bitcast(%ds.0)
}

%updated (b0: f32[6,8,4], b1: s32[], b2: f32[8,4], b3: f32[6,8,4]) -> (f32[6,8,4], f32[6,8,4]) {
  %b0 = f32[6,8,4]{2,1,0} parameter(0)
  %b1 = s32[] parameter(1)
  %b2 = f32[8,4]{1,0} parameter(2)
  %b3 = f32[6,8,4]{2,1,0} parameter(3)
  %z.1 = s32[] constant(0)
  %u.1 = f32[1,8,4]{2,1,0} bitcast(%b2)
  %dus.1 = f32[6,8,4]{2,1,0} dynamic-update-slice(%b0, %u.1, %b1, %z.1, %z.1)
  %dus.2 = f32[6,8,4]{2,1,0} dynamic-update-slice(%b3, %u.1, %b1, %z.1, %z.1)
  ROOT %t.1 = (f32[6,8,4]{2,1,0}, f32[6,8,4]{2,1,0}) tuple(%dus.1, %dus.2)
}

ENTRY %main (w: f32[6,8,4], g: f32[6,8,4], i: s32[], x: f32[8,4]) -> f32[8,4] {
  %w = f32[6,8,4]{2,1,0:T(8,128)} parameter(0)
  %g = f32[6,8,4]{2,1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %x = f32[8,4]{1,0:T(8,128)} parameter(3)
BODY
}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%y = f32[8,4]{1,0} add(%x, %x)", 3 * 128),
        ("%y = f32[8,4]{1,0:T(8,128)S(1)} copy(%x)", 128),
        ("%y = f32[8,4]{1,0} fusion(%w, %i), kind=kLoop, calls=%sliced", 2 * 128),
        ("%y = f32[8,4]{1,0:T(8,128)S(1)} fusion(%w, %i), kind=kLoop, calls=%sliced", 128),
        ("%y = (f32[6,8,4]{2,1,0}, f32[6,8,4]{2,1,0}) fusion(%w, %i, %x, %g), calls=%updated", 3 * 128),
        ("%y = f32[1,8,4]{2,1,0} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,8,4}", 2 * 128),
        ("%y = f32[6,8,4]{2,1,0} dynamic-update-slice(%w, %x, %i, %i, %i)", 2 * 128),
        ("%y = ((f32[6,8,4]{2,1,0}), f32[2,8,4]{2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:2]}", 256),
        ("%y = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%x)", 128),
        ('%y = f32[8,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0),
        ('%y = f32[8,4]{1,0} custom-call(%x), custom_call_target="kernel"', 256),
        ("%y = f32[32]{0} bitcast(%x)", 0),
        ("%y = pred[8,4]{1,0} compare(%x, %x), direction=LT", 2 * 128 + 32),
        ("%y = s4[8,4]{1,0:E(4)} convert(%x)", 128 + 16),
    ],
)
def test_traffic_of_one_instruction(line, expected):
    assert memory_traffic(MEMORY.replace("BODY", f"  ROOT {line}")) == expected


def test_traffic_in_loops():
    # per trip of the outer loop: a copied scalar, the sum of two operands, and four permutations with scalar adds
    inner = 8 * 4 * 4 * 2 + 3 * 4
    assert memory_traffic(LOOPS.replace("START", "0")) == 16 * (2 * 4 + 2 * 128 + 128 + 4 + 4 * inner)
