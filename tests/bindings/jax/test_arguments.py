# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments, closed groups, and what is not supported: an exception with a sentence."""

import copy
import pickle
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import refused
from conftest import (
    DEVICE, EXPERTS, HIDDEN, SECONDS, TOKENS, TOP_K, indices, make_mesh, on_mesh, tokens
)  # fmt: skip
from jax._src.dispatch import runtime_tokens
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import libep.jax
from libep import EpError


def round_trip(ep, mesh, between=lambda rows: rows, **options):
    """A program: every token goes to experts 0, 1, 2 and comes back."""

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(between(rows), plan)

    return jax.jit(on_mesh(mesh, body, **options))


@pytest.fixture
def pair(bootstrap):
    """A mesh of two devices, a group on it, tokens and their routing."""
    mesh = make_mesh(2)
    return mesh, bootstrap(mesh), tokens(1, 2), indices(2)


# ---- bootstrap ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text, fields", [
    (r"RANGE expected one of the mesh's axes \('ep',\), got 'expert'", {"axis": "expert"}),
    ("RANGE expected a multiple of the 2 devices along 'ep', got 7", {"num_experts": 7}),
    (r"TOP_K top_k: expected 1 \.\. 32, got 33", {"top_k": 33}),
    ("ROW_BYTES hidden: .* multiple of 16 .*, got 3 of float32: 12", {"hidden": 3}),
    ("ROW_BYTES hidden: expected rows of .* up to 65536, got", {"hidden": 2**40}),
    ("TYPE dtype: expected float32 or bfloat16 or float16, got int8", {"dtype": jnp.int8}),
    ("TYPE dtype: expected float32 or .*, got float64", {"dtype": np.float64}),
    ("TYPE dtype: expected float32 or .*, got 'wide'", {"dtype": "wide"}),
    ("TYPE num_experts: expected an integer, got True", {"num_experts": True}),
    ("TYPE num_experts: expected an integer, got '8'", {"num_experts": "8"}),
    ("TYPE max_recv_rows: expected an integer, got 8.0", {"max_recv_rows": 8.0}),
    ("ALIGNMENT alignment", {"alignment": 3}),
    ("RANGE num_physical: expected a multiple of the 2 devices", {"num_physical": 9}),
    ("RANGE num_physical", {"num_physical": -2}),
    ("UNSUPPORTED max_ranks: expected none, .* do not join, got 4", {"masks": 1, "max_ranks": 4}),
    ("RANGE choice: expected one of near, spread, got 'far'", {"choice": "far"}),
    ("TYPE axis: expected an axis of the mesh or a tuple .*, got None", {"axis": None}),
    ("UNSUPPORTED max_recv_rows: expected a number of rows, got 0", {"max_recv_rows": 0}),
    ("UNSUPPORTED backend: expected none, since .* mesh", {"backend": libep.Backend.HOST}),
    ("UNSUPPORTED device: expected none, since it follows from mesh, got 0", {"device": 0}),
    ("UNSUPPORTED max_row_bytes: expected none, since .* hidden", {"max_row_bytes": 64}),
    ("UNSUPPORTED mode: expected Mode.THROUGHPUT, got", {"mode": libep.Mode.LATENCY}),
    ("UNSUPPORTED mode: .*THROUGHPUT, got Mode.LATENCY", {"mode": "latency"}),
    ("UNSUPPORTED mode: .*THROUGHPUT, got Mode.AUTO", {"mode": "auto"}),
    ("RANGE mode: expected one of auto, .*, got 'fast'", {"mode": "fast"}),
    ("UNSUPPORTED layout: expected none, since libep.jax sets it, got", {"layout": "flat"}),
    ("RANGE quant: expected one of none, .*, got 'fp4'", {"quant": "fp4"}),
    ("ALIGNMENT a multiple of 128", {"quant": "nvfp4", "scale_order": "swizzled"}),
    ("TYPE mesh: expected a jax.sharding.Mesh, got", {"mesh": None}),
    ("TYPE mesh: expected a jax.sharding.Mesh, got", {"mesh": "abstract"}),
    ("TypeError max_tokenz", {"max_tokenz": 3}),
])  # fmt: skip
def test_bootstrap(bootstrap, text, fields):
    mesh = make_mesh(2)
    given = {"mesh": mesh, **fields}
    if given["mesh"] == "abstract":
        given["mesh"] = mesh.abstract_mesh
    with refused(text):
        bootstrap(**given)
    bootstrap(mesh)  # nothing was left behind


# ---- operations --------------------------------------------------------------------------------

ROWS, BIAS = jnp.zeros((72, HIDDEN)), jnp.zeros((12, HIDDEN))


@pytest.mark.parametrize("text, rows, weights, bias", [
    (r"SHAPE expert_out: expected shape \[72, any\], got \[5, 16\]", ROWS[:5], None, ()),
    ("TYPE expert_out: expected float32", ROWS.astype("i4"), None, ()),
    (r"SHAPE recv_weights: expected shape \[72\]", ROWS, jnp.zeros(5), ()),
    ("TYPE recv_weights: expected float32", ROWS, jnp.zeros(72, "f2"), ()),
    (r"SHAPE combine: bias: expected shape \[12, 16\], got \[2, 16\]", ROWS, None, BIAS[:2]),
    ("TYPE combine: bias: expected float32, got bfloat16", ROWS, None, BIAS.astype("bfloat16")),
    ("TYPE combine: bias: expected an array, got int", ROWS, None, 3),
    ("SHAPE combine: bias: expected up to 2 arrays, got 3", ROWS, None, [BIAS] * 3),
])  # fmt: skip
def test_combine(pair, text, rows, weights, bias):
    mesh, ep, x, idx = pair
    assert ep.max_recv_rows == 72

    def body(x, idx):
        return ep.combine(rows, ep.dispatch(x, idx)[2], weights, bias=bias)

    with refused(text):
        on_mesh(mesh, body)(x, idx)


def test_another_shard_map(pair):
    _, ep, x, idx = pair
    call = lambda x, idx: ep.dispatch(x, idx)[0]  # noqa: E731
    other = make_mesh(2, names=("other",))
    with refused(r"EpError dispatch: expected a call inside shard_map over .*'other'"):
        jax.shard_map(call, mesh=other, in_specs=P("other"), out_specs=P("other"))(x, idx)
    with refused("EpError expected 2 devices along .*, got 4"):
        on_mesh(make_mesh(4), call)(tokens(1, 4), indices(4))


def test_arguments_that_are_no_arrays(pair):
    _, ep, x, idx = pair
    rows, _, plan = ep.dispatch(x, idx)
    for text, call in [
        ("dispatch: expected arrays, got int", lambda: ep.dispatch(x, idx.tolist())),
        ("dispatch: topk_idx: expected an array, got NoneType", lambda: ep.dispatch(x, None)),
        (r"combine: plan: expected the Plan of .*, got uint8\[",
         lambda: ep.combine(rows, plan.bytes)),
        (r"experts: plan: expected the Plan of .*, got uint8\[",
         lambda: ep.experts(lambda *a: a[0], rows, plan.bytes, (), ())),
    ]:  # fmt: skip
        with refused(f"EpError {text}"):
            call()


@pytest.mark.parametrize("devices", [[2, 3], [1, 0], [0, 2]])
def test_another_mesh(pair, devices):
    """Other devices, or the same in another order, are refused before the program runs."""
    make_mesh(4)  # or skip
    mesh, ep, x, idx = pair
    other = Mesh(np.array(jax.devices())[devices], ("ep",))
    words = "prepare: expected a shard_map whose .*, got devices " + re.escape(str(devices))
    with refused(f"FOREIGN {words}"):
        round_trip(ep, other)(x, idx)
    with jax.set_mesh(other), refused(f"FOREIGN {words}"):
        round_trip(ep, None)(x, idx)
    np.testing.assert_array_equal(round_trip(ep, mesh)(x, idx), TOP_K * x)


def test_a_mesh_of_the_same_groups(bootstrap):
    """Other axes of a mesh may be others: the devices along the group's axis count."""
    one = make_mesh(2, 2, names=("data", "ep"))
    ep, axes = bootstrap(one), P(("pipe", "ep"))
    turned = Mesh(one.devices[::-1], ("pipe", "ep"))
    call = lambda x, idx: ep.dispatch(x, idx)[0]  # noqa: E731
    program = jax.shard_map(call, mesh=turned, in_specs=axes, out_specs=axes)
    assert jax.jit(program)(tokens(1, 4), indices(4)).shape == (4 * ep.max_recv_rows, HIDDEN)
    crossed = Mesh(np.stack([one.devices[0], one.devices[1, ::-1]]), ("data", "ep"))
    with refused(r"EpError got devices \[3, 2\]"):
        round_trip(ep, crossed)(tokens(1, 2), indices(2))


on_cpus = pytest.mark.skipif(DEVICE != "cpu", reason="places of GPUs are not compared")


@on_cpus
@pytest.mark.parametrize("devices, words", [
    ([1, 0], r"place \d in shard_map, as in"), ([2, 3], "a device of group")
])  # fmt: skip
def test_another_mesh_that_is_abstract(pair, devices, words):
    """A shard_map over an AbstractMesh has no devices before it runs."""
    mesh, ep, *given = pair
    program = round_trip(ep, mesh.abstract_mesh)
    y = program(*jax.device_put(given, NamedSharding(mesh, P("ep"))))
    np.testing.assert_array_equal(y, TOP_K * given[0])
    split = NamedSharding(Mesh(np.array(jax.devices())[devices], ("ep",)), P("ep"))
    with pytest.raises(JaxRuntimeError, match=f"expected .*{words}.*EP_ERR_FOREIGN"):
        jax.block_until_ready(program(*jax.device_put(given, split)))


@on_cpus
def test_set_mesh_of_a_compiled_program(pair):
    """JAX lowers a program once for all meshes of jax.set_mesh that have the same axes."""
    mesh, ep, x, idx = pair
    program = round_trip(ep, None)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(program(x, idx), TOP_K * x)
    with jax.set_mesh(Mesh(mesh.devices[::-1], ("ep",))):
        with pytest.raises(JaxRuntimeError, match="expected place .*EP_ERR_FOREIGN"):
            jax.block_until_ready(program(x, idx))


def test_a_plan_that_is_none(pair, bootstrap):
    """A program that failed takes its group with it, and no other."""
    (mesh, ep, *given), other = pair, bootstrap(pair[0])

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(rows, jax.tree.map(jnp.zeros_like, plan))

    # On GPUs a program ends as usual, and the status of the group says that its results are void.
    sentence = "EP_ERR_NOT_PREPARED|given up|expected a plan, which ep_prepare writes"
    with pytest.raises((JaxRuntimeError, EpError), match=sentence):
        jax.block_until_ready(jax.jit(on_mesh(mesh, body))(*given))
        ep.check()
    np.testing.assert_array_equal(round_trip(other, mesh)(*given), TOP_K * given[0])


def test_routing_errors(pair):
    """One check reports all ranks, so that a later one is not about this step."""
    mesh, ep, x, idx = pair
    places = [rf"group \d+, device {d.id} \(ep={r}\): rank {r}" for r, d in enumerate(mesh.devices)]
    wrong = idx.at[5, 1].set(EXPERTS)
    for routing, text in [
        (wrong, "token 5"),
        (wrong.at[TOKENS + 7, 0].set(EXPERTS), f"{places[0]}: .*token 5.*; {places[1]}: .*token 7"),
    ]:
        y = round_trip(ep, mesh)(x, routing).block_until_ready()
        np.testing.assert_array_equal(y[5], 2 * x[5])  # the entry counts as "no expert"
        with refused(f"ROUTING {text}"):
            ep.check()
        ep.check()


def alone(call):
    """Run the tangents of a program by themselves, as an interpreter of its equations does."""

    def run(x):
        (equation,) = jax.make_jaxpr(call)(x).eqns
        for each in equation.params["jaxpr"].eqns:
            if each.primitive.name.endswith("_tangent"):
                zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in each.invars]
                each.primitive.bind(*zeros, **each.params)

    return run


@pytest.mark.parametrize("run", [jax.jit, lambda call: call, alone], ids=["jit", "eager", "alone"])
@pytest.mark.parametrize("which", ["rows", "weights", "bias", "mapped", "twice"])
def test_what_is_not_supported(pair, which, run):
    """Forward mode of each input, vmap, second derivatives."""
    mesh, ep, x, idx = pair

    def layer(x, weights, bias):
        rows, row_weights, plan = ep.dispatch(x, idx[:TOKENS], weights)
        return ep.combine(rows, plan, row_weights, bias=bias)

    def body(x):
        given = {"rows": x, "weights": jnp.ones((TOKENS, TOP_K)), "bias": x}
        if which == "mapped":
            return jax.vmap(lambda x: layer(x, *[*given.values()][1:]))(x[None])[0]
        if which == "twice":
            square = lambda x: (layer(x, *[*given.values()][1:]) ** 2).sum()  # noqa: E731
            return jax.grad(lambda x: jax.grad(square)(x).sum())(x)
        call = lambda value: layer(*{**given, which: value}.values())  # noqa: E731
        return jax.jvp(call, (given[which],), (2 * given[which],))[1]

    words = {"mapped": "UNSUPPORTED expected a call outside of jax.vmap",
             "twice": "UNSUPPORTED combine_backward: expected first derivatives alone"}
    with refused(words.get(which, "EpError expected reverse mode.*got forward mode")):
        run(on_mesh(mesh, body))(x)


MAP = jnp.arange(10)


@pytest.mark.parametrize("text, fields, placement", [
    ("NULL placement: expected one, since .* a num_physical, got None", {"num_physical": 10}, None),
    ("UNSUPPORTED placement: expected None, since .* no num_physical, got one", {}, MAP),
    (r"SHAPE placement: expected shape \[10\], got \[9\]", {"num_physical": 10}, MAP[:9]),
    ("TYPE placement: expected int32, got float32", {"num_physical": 10}, MAP.astype("f4")),
    ("TYPE placement: expected an array, got list", {"num_physical": 10}, [*range(10)]),
])  # fmt: skip
def test_dispatch_placed(bootstrap, text, fields, placement):
    ep = bootstrap(make_mesh(2), **fields)
    with refused(text):
        ep.dispatch(tokens(1, 2), indices(2), placement=placement)


def test_placement_out_of_range(bootstrap):
    """Its entries are no experts; check reports them."""
    ep, x = bootstrap(make_mesh(2), num_physical=10), tokens(1, 2)
    placed = jax.jit(lambda map: ep.combine(*ep.dispatch(x, indices(2), placement=map)[::2]))
    np.testing.assert_array_equal(placed(MAP.at[0].set(EXPERTS)), (TOP_K - 1) * x)
    with refused("ROUTING"):
        ep.check()


# ---- the end of a group ------------------------------------------------------------------------


def test_closed(pair):
    """Arrays outlive the group; programs that call it get an error."""
    mesh, ep, x, idx = pair
    program = round_trip(ep, mesh)
    y = program(x, idx).block_until_ready()
    ep.close()
    ep.close()
    np.testing.assert_array_equal(y, TOP_K * x)
    with pytest.raises(JaxRuntimeError, match=r"rank \d: prepare: the group is closed"):
        program(x, idx).block_until_ready()
    with refused("EpError closed"):
        ep.check()


holds_programs = pytest.mark.skipif(DEVICE != "cpu", reason="calls of GPUs are only enqueued")


def called_back(ep, mesh, function):
    """A round trip that calls function(rank, rows) of the host in the middle."""

    def between(rows):
        return jax.pure_callback(function, rows, jax.lax.axis_index("ep"), rows)

    return round_trip(ep, mesh, between, check_vma=False)


def held_program(ep, mesh):
    """A program whose rank 0 waits in the middle. Returns what runs it, and two events."""
    begun, go = threading.Event(), threading.Event()

    def hold(rank, rows):
        begun.set()
        if rank == 0:
            go.wait(15)
        return rows

    return called_back(ep, mesh, hold), begun, go


@holds_programs
def test_closed_while_a_program_runs(pair):
    """close waits for what has been enqueued."""
    mesh, ep, x, idx = pair
    program, _, go = held_program(ep, mesh)
    with ep:
        y = program(x, idx)
        threading.Timer(3, go.set).start()
    assert y.is_ready()
    np.testing.assert_array_equal(y, TOP_K * x)


@holds_programs
@pytest.mark.parametrize("leaves_by_error", [True, False])
def test_closed_while_a_rank_is_missing(pair, monkeypatch, leaves_by_error):
    """One rank is late, the other waits for it in libep: the wait ends."""
    mesh, ep, x, idx = pair
    monkeypatch.setattr(ep._ranks, "_wait_seconds", 1)  # the deadline of this wait alone
    program, begun, go = held_program(ep, mesh)
    y = program(x, idx)
    assert begun.wait(SECONDS)
    time.sleep(0.5)
    start = time.monotonic()
    threading.Timer(4, go.set).start()
    if leaves_by_error:
        with pytest.raises(ZeroDivisionError), ep:
            raise ZeroDivisionError
    else:
        ep.close()
    assert time.monotonic() - start < SECONDS / 2
    with pytest.raises(JaxRuntimeError, match="closed"):
        y.block_until_ready()
    runtime_tokens.clear()  # else JAX reports the callback's failed program when the process ends


@holds_programs
def test_a_callback_that_fails_on_one_device(pair, bootstrap):
    """The other device, which waits for it, does not wait until the deadline."""
    mesh, ep, x, idx = pair
    other = bootstrap(mesh)

    def fail(rank, rows):
        if rank == 1:
            raise ValueError("no such rows")
        return rows

    start = time.monotonic()
    with pytest.raises(JaxRuntimeError, match="no such rows"):
        called_back(ep, mesh, fail)(x, idx).block_until_ready()
    assert time.monotonic() - start < SECONDS / 2
    sentence = r"a program failed on group \d+, device 1 \(ep=1\): .*no such rows"
    with refused(f"ABORTED {sentence}"):
        ep.check()
    np.testing.assert_array_equal(round_trip(other, mesh)(x, idx), TOP_K * x)
    runtime_tokens.clear()  # else JAX reports the callback's failed program when the process ends


@holds_programs
def test_a_device_is_missed_and_masked(bootstrap):
    """The other fails at its deadline. It goes on alone, then takes the missing one back."""
    mesh, x = make_mesh(2), tokens(1, 2)
    ep = bootstrap(mesh, masks=1, timeout_seconds=10)  # of the waits that succeed, too

    def fail(rank, rows):
        if is_failing and rank == 1:
            raise ValueError("no such rows")
        return rows

    program, is_failing = called_back(ep, mesh, fail), True
    with pytest.raises(JaxRuntimeError):
        program(x, indices(2)).block_until_ready()
    with refused(r"TIMEOUT group \d+, device 0 .*rank 1 did not arrive within 10 s"):
        ep.check()
    is_failing = False
    with refused(r"SHAPE mask: alive: expected the mesh's shape \(2,\), got \(3,\)"):
        ep.mask([1, 1, 1])
    for alive in ([True, False], [1, 1], [0, 1]):
        ep.mask(alive)
        of_tokens = np.repeat(alive, TOKENS)[:, None]
        # Experts 0, 1, 2 are those of device 0.
        np.testing.assert_array_equal(program(x, indices(2)), alive[0] * TOP_K * of_tokens * x)
    assert program._cache_size() == 1
    ep.mask([1, 1])
    ep.check()
    runtime_tokens.clear()  # else JAX reports the callback's failed program when the process ends


def test_mask_without_masks(pair):
    """It is refused, and all devices take part as before."""
    mesh, ep, x, idx = pair
    with refused("UNSUPPORTED mask: expected bootstrap's masks=1, got an Ep without masks"):
        ep.mask([True, False])
    np.testing.assert_array_equal(round_trip(ep, mesh)(x, idx), TOP_K * x)


def test_copies(pair):
    """A copy of a model that holds an Ep shares it; none is saved."""
    _, ep, _, _ = pair
    assert copy.deepcopy({"ep": ep})["ep"] is ep and copy.copy(ep) is ep
    with refused("TypeError Ep belongs to its process: .* call bootstrap anew"):
        pickle.dumps(ep)


