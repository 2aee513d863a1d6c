# SPDX-License-Identifier: Apache-2.0
"""The face of libep.torch for the common suite: its calls under autograd."""

import contextlib

import numpy as np
import torch
from conftest import DEVICE, make_group, on_device, run_threads, use_gpu
from reference import pad
from torch.utils.checkpoint import checkpoint

import libep
import libep.torch as ep

NAME = "torch"
LAYOUTS = ("expert_major", "flat", "batched", "rank_major")
DTYPES = ("float32", "float16", "bfloat16")
SIZES = (1, 2, 3)
HAS_EXACT_SIZES = HAS_UNEVEN_EXPERTS = HAS_CHECKPOINTS = HAS_IDS_OF_TAILS = True
HAS_PLANS = PADS_ALWAYS = False
BATCHED_ROWS, COUNTS_BACKWARD = 24, False
NUMBERS = "expert_counts expert_padded expert_offsets expert_ends totals source_rows".split()


def experts(received, scale, weights):
    """What the experts return, and the slots' weights."""
    rows, given = received.tokens, received.topk_weights
    if received.topk_idx is not None:  # one row for all local experts of a token
        factors = (given * scale).sum(-1)
        return (rows, factors) if weights == "combine" else (rows * factors[..., None], None)
    if weights == "none":
        return rows, None
    rows = rows * scale[..., None]
    return (rows * given[..., None], None) if weights == "experts" else (rows, given)


def play(bootstrap, world, case, expected):
    everyone = set(range(world.size))
    rank, is_latency = bootstrap.rank, case.layout in ("batched", "rank_major")
    fields = dict(max_recv_rows=case.capacity, mode="latency" if is_latency else "throughput")
    fields.update(masks=case.masks)
    if case.choice:
        fields.update(choice=case.choice, num_physical=len(world.map))
    options = dict(rows_per_expert=BATCHED_ROWS) if case.layout == "batched" else {}
    with make_group(bootstrap, world, **fields) as group:
        handle = ep.Handle(group, layout=case.layout, alignment=case.alignment, **options)
        counters = ep.Counters.zeros(handle) if case.is_counted else ep.Counters()
        counts = dict(counters=counters if case.is_counted else None)
        for left in reversed(range(case.steps)):
            if rank in world.masked:
                group.mask(everyone)  # when the others are done
                return None
            if case.masks:
                group.mask(everyone - set(world.masked))
            if case.choice:
                group.place(np.roll(world.map, left))
            x, w, grad = (pad(case, world, a[rank], np.nan)
                          for a in (world.x, world.weights, world.grad_out))  # fmt: skip
            x = on_device(x).to(getattr(torch, case.dtype)).requires_grad_(not is_latency)
            w = on_device(w, grad=not is_latency)
            inputs = x, on_device(pad(case, world, world.idx[rank], 2))
            if case.is_padded:
                counts["num_tokens"] = torch.tensor([world.tokens[rank]], device=group.device)
            sent = () if case.weights in ("none", "home") else (w,)
            home = dict(topk_weights=w) if case.weights == "home" else {}
            biases = [
                on_device(bias[rank]).to(x.dtype).requires_grad_(not is_latency)
                for bias in world.biases[: case.biases]
            ]
            home["counters"] = counters.without_experts
            home["bias"] = biases if case.biases > 1 else biases[0] if biases else None

            def run(inputs=inputs, sent=sent, home=home):
                if case.is_split:
                    received, hook = ep.dispatch_send(handle, *inputs, *sent, **counts)
                    hook()
                else:
                    received = ep.dispatch(handle, *inputs, *sent, **counts)
                scale = torch.full((*received.tokens.shape[:-1], *expected[rank].scale.shape[
                    received.tokens.ndim - 1 :]), torch.nan)  # fmt: skip
                known = torch.from_numpy(expected[rank].scale)
                scale[: len(known)] = known
                done, slot_w = experts(received, scale.to(group.device), case.weights)
                if case.is_split:
                    out, hook = ep.combine_send(handle, received.plan, done, slot_w, **home)
                    hook()
                else:
                    out = ep.combine(handle, received.plan, done, slot_w, **home)
                return out, received

            out, received = checkpoint(run, use_reentrant=False) if case.checkpoint else run()
            if not is_latency:
                out.backward(on_device(grad).to(out.dtype))
        if case.masks:
            group.mask(everyone)
        assert group.status().status == libep.Status.OK
        got = dict(recv=received.tokens, recv_w=received.topk_weights, recv_idx=received.topk_idx,
                   out=out, grad_x=x.grad, grad_w=w.grad)  # fmt: skip
        got.update({name: getattr(received.plan, name) for name in NUMBERS})
        if not is_latency:
            got.update({f"grad_bias{i}": bias.grad for i, bias in enumerate(biases)})
        dtypes = {str(t.dtype).split(".")[1] for t in (out, out if is_latency else x.grad)}
        del received, out
        got = {name: as_numpy(tensor) for name, tensor in got.items()}
        return dict(got, dtypes=dtypes, counters=[as_numpy(each) for each in counters])


def as_numpy(tensor):
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def step(world, case, expected):
    """A step of all ranks. Returns for each rank what the suite compares."""
    return run_threads(world.size, play, world, case, expected)


@contextlib.contextmanager
def dispatcher():
    """Dispatches on one rank, with gradients where these are given."""
    if DEVICE == "cuda":
        use_gpu(0)
    (bootstrap,) = libep.Bootstrap.local(1)
    with make_group(bootstrap, max_recv_rows=None) as group:
        handle = ep.Handle(group)

        def call(tokens, topk_idx, topk_weights, num_tokens):
            given = [
                torch.from_numpy(a).to(group.device) if isinstance(a, np.ndarray) else a
                for a in (tokens, topk_idx, topk_weights, num_tokens)
            ]
            for tensor in (given[0], given[2]):
                if torch.is_tensor(tensor) and tensor.is_floating_point():
                    tensor.requires_grad_()
            errors = []
            for arguments in (given, [t.detach() if torch.is_tensor(t) else t for t in given]):
                try:
                    received = ep.dispatch(handle, *arguments[:3], num_tokens=arguments[3])
                    out = ep.combine(handle, received.plan, received.tokens, received.topk_weights)
                except (TypeError, libep.EpError) as error:
                    errors.append(error)
            assert len({(type(e), str(e).split(":")[-1]) for e in errors}) < 2, errors
            if errors:
                assert len(errors) == 2, errors
                raise errors[0]
            return as_numpy(out)

        yield call
    bootstrap.close()
