# SPDX-License-Identifier: Apache-2.0
"""Print what libep.torch.MoE or libep.jax.moe takes, forward, and forward and backward.

    torchrun --nproc-per-node 4 tools/frameworks/layer_step.py torch cuda
    python tools/frameworks/layer_step.py jax cuda                 on all devices of the process

Times are microseconds of a step, of steps one after the other, the fastest of several runs. A rank
has 4,096 tokens in bfloat16 and 16 experts with SwiGLU. In PyTorch tokens have 4096 elements, F is
1536, top-8, and sizes are exact. Beside it stands the same layer with all_to_all_single, sorts and
the same grouped products. In JAX tokens have 2048 elements, F is 1024, top-4, and receive rows are
1.25 times those of an even routing. There the layer is also measured under jax.checkpoint without a
policy, and with jax.lax.ragged_dot if --ragged is given. On CPUs the layers are small, to try the
script.
"""

import functools
import os
import sys

import overhead
from overhead import DEVICE, Sizes, fastest, print_row

LAYERS = {"torch": Sizes(4096, 4096, 1536, 8, 16), "jax": Sizes(4096, 2048, 1024, 4, 16)}
SMALL = Sizes(64, 128, 128, 2, 4)
COLUMNS = ("forward", "with bwd.")


def measure_torch(layer):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import libep.torch as ep
    from libep.torch._experts import GROUPED_ALIGNMENT, grouped_mm, swiglu

    overhead.LAYER = layer
    from with_torch import gpu_time, plain_layer

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    sizes = dict(num_experts=ranks * layer.experts, max_tokens=layer.tokens, hidden=layer.hidden)
    group = ep.create_group(**sizes, top_k=layer.top_k, alignment=GROUPED_ALIGNMENT)
    moe = ep.MoE(group, layer.hidden, layer.inner, normalise=True, dtype=torch.bfloat16)
    make = {"device": group.device, "dtype": torch.bfloat16}
    x = torch.randn(layer.tokens, layer.hidden, **make).requires_grad_()
    grad = torch.randn(layer.tokens, layer.hidden, **make)

    def experts(rows, ends):
        if DEVICE == "cpu":  # on which PyTorch's grouped product has no gradient of such strides
            padded = torch.diff(ends, prepend=ends.new_zeros(1))
            plan = ep.Plan(ends, torch.cat([padded, padded]), 0, len(ends))
            return grouped_mm(swiglu(grouped_mm(rows, moe.gate_up, plan)), moe.down, plan)
        both = F.grouped_mm(rows, moe.gate_up, offs=ends)
        return F.grouped_mm(swiglu(both), moe.down, offs=ends)

    def plain():
        return plain_layer(x, *moe.route(x), layer.experts, experts)

    def both_ways(forward):
        def step():
            forward().backward(grad)
            moe.zero_grad()
            x.grad = None

        return step

    def time_of(call):
        if DEVICE == "cuda":
            return gpu_time(call, 10)
        return fastest(lambda count: [call() for _ in range(count)], 2, lambda: None, 1)

    with_libep = functools.partial(moe, x)
    difference = (with_libep() - plain()).abs().max() / plain().abs().max()
    if rank == 0:
        print(f"# a layer on {ranks} ranks; results differ by {difference.item():.1e} at most")
        print_row("# us per step", COLUMNS)
    rows = {"libep.torch.MoE": with_libep, "all_to_all_single and sorts": plain}
    for name, forward in rows.items():
        times = [time_of(forward), time_of(both_ways(forward))]
        if rank == 0:
            print_row(name, (f"{t:.0f}" for t in times))
    finding = group.status()
    if finding.status:
        raise SystemExit(finding.sentence)
    group.close()
    dist.destroy_process_group()


def measure_jax(layer, with_ragged):
    os.environ["JAX_PLATFORMS"] = DEVICE
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import libep.jax

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    sizes = dict(num_experts=devices * layer.experts, max_tokens=layer.tokens, top_k=layer.top_k)
    sizes.update(hidden=layer.hidden, dtype=jnp.bfloat16, capacity_factor=1.25, overflow="drop")
    place = NamedSharding(mesh, P("ep"))
    print(f"# a layer on {devices} devices, jax {jax.__version__}")
    print_row("# us per step", COLUMNS)
    policies = {"libep.jax.moe": (128, lambda layer: layer), "under checkpoint": (128, jax.checkpoint)}
    if with_ragged:
        policies["with jax.lax.ragged_dot"] = 1, lambda layer: layer
    for name, (alignment, wrap) in policies.items():
        with libep.jax.bootstrap(mesh, "ep", alignment=alignment, **sizes) as ep:
            make = functools.partial(libep.jax.moe_parameters, ep=ep, hidden=layer.hidden)
            make = functools.partial(make, inner=layer.inner, dtype=jnp.bfloat16)
            split = {"router": NamedSharding(mesh, P()), "gate_up": place, "down": place}
            params = jax.jit(make, out_shardings=split)(jax.random.key(0))
            draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=place)
            shape = devices * layer.tokens, layer.hidden
            x, grad = (draw(jax.random.key(n), shape, jnp.bfloat16) for n in (1, 2))
            function = wrap(functools.partial(libep.jax.moe, ep, normalise=True))

            def both(params, x, grad, function=function):
                y, pull = jax.vjp(function, params, x)
                return y, *pull(grad)

            programs = [(jax.jit(function), (params, x)), (jax.jit(both), (params, x, grad))]
            times = []
            for program, given in programs:

                def run(count, program=program, given=given):
                    for _ in range(count):
                        results = program(*given)
                    jax.block_until_ready(results)

                times.append(fastest(run, 10 if DEVICE == "cuda" else 2, lambda: None, 5))
            print_row(name, (f"{t:.0f}" for t in times))
            ep.check()


if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in LAYERS] or DEVICE not in ("cpu", "cuda"):
        raise SystemExit(__doc__)
    sizes_of_layer = LAYERS[sys.argv[1]] if DEVICE == "cuda" else SMALL
    if sys.argv[1] == "torch":
        measure_torch(sizes_of_layer)
    else:
        measure_jax(sizes_of_layer, "--ragged" in sys.argv)
