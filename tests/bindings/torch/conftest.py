# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the device, ranks as threads, seeds, and groups."""

import contextlib
import inspect
import os
import sys

import pytest
import torch

import libep
import libep.torch as ep
from libep.deep_ep import Buffer

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.join(HERE, "../../../bindings/torch/examples")
sys.path[:0] = [HERE, os.path.join(HERE, "../common"), EXAMPLES]

import base  # noqa: E402
import processes  # noqa: E402
from base import DEVICE, NODES, SECONDS, make_nodes  # noqa: E402
from reference import World  # noqa: E402

DEEP_EP = os.environ.pop("LIBEP_TEST_DEEP_EP", None)  # a folder with DeepEP's sources
BACKEND = libep.Backend.CUDA if DEVICE == "cuda" else libep.Backend.HOST

seed, nodes = base.seed, make_nodes(*NODES)
torch.set_num_threads(1)
processes.PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "libep.torch", "libep.deep_ep"]


def make_group(meeting, world=None, **fields):
    """libep.torch.create_group with small sizes, or those of a World."""
    given = dict(num_experts=6, max_tokens=8, hidden=16, top_k=2, dtype=torch.float32)
    given.update(backend=BACKEND, timeout_seconds=SECONDS)
    if world is not None:
        given.update(num_experts=world.experts, max_tokens=world.max_tokens)
        given.update(hidden=world.hidden, top_k=world.top_k)
    return ep.create_group(meeting, **{**given, **fields})


def make_buffer(meeting, world=None, kind=Buffer, **fields):
    return destroyed(kind(meeting, **fields))


@contextlib.contextmanager
def destroyed(buffer):
    """Destroy a buffer at the end of the block, before its bootstrap. Tell the peers of an error."""
    try:
        yield buffer
    except BaseException as error:
        for made in buffer._groups._all:
            getattr(made, "group", made).abort(f"the test failed: {error}")
        raise
    finally:
        buffer.destroy()


def use_gpu(ordinal):
    """Make a GPU current, with memory and cuBLAS. In one process their first use may wait for all
    GPUs, also for one whose kernel waits for this rank."""
    torch.cuda.set_device(ordinal)
    square = torch.ones(64, 64, device="cuda")
    torch.mm(square, square)
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()


def need_gpus(size):
    """Skip a test on GPUs if there are fewer of them."""
    if DEVICE == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


def run_threads(size, body, *arguments):
    """base.run_threads. Rank r has GPU r."""

    def play(bootstrap):
        if DEVICE == "cuda":
            use_gpu(bootstrap.rank)
        return body(bootstrap, *arguments)

    need_gpus(size)
    return base.run_threads(size, play)


def on_ranks(*parameters, size=2, make=make_group, world=None, **fields):
    """The test runs on a thread for each rank, in the block of a make(bootstrap, world, **fields).

    parameters  fields, or sizes of the World, that are parameters of the test
    world       sizes of a World: the test gets what is made, its rank and the World. Without it the
                test gets what is made, alone
    """

    def decorate(body):
        own = [*inspect.signature(body).parameters][1 if world is None else 3 :]
        needed = {*own, *parameters, *(() if world is None else ["seed"])}
        of_world = {"tokens", "top_k"} & needed

        def test(**given):
            named = {name: given[name] for name in parameters if name not in of_world}
            options, arguments = {**fields, **named}, {name: given[name] for name in own}
            sizes = {**(world or {}), **{name: given[name] for name in of_world}}
            inputs = None if world is None else World(given["seed"], **sizes)

            def play(bootstrap):
                more = () if inputs is None else (bootstrap.rank, inputs)
                with make(bootstrap, inputs, **options) as made:
                    body(made, *more, **arguments)

            run_threads(size if inputs is None else inputs.size, play)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in sorted(needed)])
        test.__doc__ = body.__doc__
        return test

    return decorate


@pytest.fixture
def alone():
    """A function that makes groups of one rank, with static sizes unless told otherwise."""
    made = []

    def make(**fields):
        (bootstrap,) = libep.Bootstrap.local(1)
        group = make_group(bootstrap, **{"max_recv_rows": None, **fields})
        made.append((group, bootstrap))
        return group

    yield make
    for group, bootstrap in made:
        group.abort("the test is over")
        group.leave()
        bootstrap.close()


# ---- tensors -----------------------------------------------------------------------------------


def quarters(seed, tokens, hidden, experts, top_k, device):
    """Tokens, routing without repeats, and weights: multiples of 1/4, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-16, 17, (tokens, hidden), generator=generator) / 4
    idx = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    weights = torch.randint(1, 9, (tokens, top_k), generator=generator) / 4
    return x.to(device), idx.to(device), weights.to(device)


def ones(tokens=3, top_k=2):
    """Tokens of ones, each for the experts 0 .. top_k - 1, and weights of ones."""
    x, weights = torch.ones(tokens, 16, device=DEVICE), torch.ones(tokens, top_k, device=DEVICE)
    return x, torch.tensor([[*range(top_k)]] * tokens, device=DEVICE), weights


def on_device(array, **options):
    """A tensor on the device of a NumPy array."""
    return torch.from_numpy(array).to(DEVICE).requires_grad_(options.get("grad", False))


def inputs_of(world, rank):
    """Tokens, routing and weights of a rank."""
    return [on_device(a[rank]) for a in (world.x, world.idx, world.weights)]


def other_device():
    """One on which no group of the tests is, and whose tensors have no elements on CPUs."""
    return "cpu" if DEVICE == "cuda" else "meta"


def off(tensor):
    """A copy that starts one element behind a multiple of 16 bytes."""
    return torch.cat([tensor.new_empty(1), tensor.flatten()])[1:].view(tensor.shape)


def strided(tensor):
    """A copy whose rows do not follow one another."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def wrong_rows(x):
    """Rows that are refused in the place of x: types, shapes, a start, a device, no tensor."""
    return [x.double(), x[None], x[..., :3].contiguous(), off(x), x.to("meta"), x.tolist(), None]


def wrong_indices(idx):
    wide = idx.repeat(1, 17)[:, :33]
    return [idx.short(), idx.float(), idx[1:], idx[0], idx.to("meta"), idx.tolist(), wide]


def wrong_weights(weights):
    return [weights.double(), weights[1:], weights.to("meta"), [1.0]]


def refuse_each(call, good, changes, error=libep.EpError):
    """A call with one argument changed is refused, with a sentence that names it.

    changes: for each argument the values that are refused.
    """
    for name, values in changes.items():
        for value in values:
            with pytest.raises(error, match=f"{name}: expected .*, got "):
                call(**{**good, name: value})


def assert_equal(got, expected):
    """Compare a tensor with a NumPy array or a tensor, bit for bit except the sign of zero."""
    expected = torch.as_tensor(expected)
    assert got.shape == expected.shape
    assert torch.equal(got.detach().cpu().to(expected.dtype), expected.cpu())


def assert_close(got, expected, tolerance, quantile=1.0):
    """Compare tensors, or that share of their elements which are closest, relative to the largest
    element of `expected`."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    assert got.shape == expected.shape
    if expected.numel():
        errors = (got - expected).abs().flatten().sort().values
        worst = errors[int(quantile * (len(errors) - 1))].item()
        limit = tolerance * expected.abs().max().item()
        assert worst <= limit, f"differ by {worst}, expected at most {limit}"
