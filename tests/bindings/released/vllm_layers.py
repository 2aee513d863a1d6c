# SPDX-License-Identifier: Apache-2.0
"""What a rank of test_vllm.py does. Each public function is a test's."""

import logging
import threading
from types import SimpleNamespace

import dense
import libep.deep_ep
import libep.vllm
import torch
import torch.distributed as dist
from dense import DEVICE, factor
from libep import EpError
from vllm_release import WholeConfig, make_communicator, make_layer, make_streams, prepare

libep.deep_ep.install()
config = prepare()
assert libep.vllm.register()

import vllm  # noqa: E402
import vllm.forward_context  # noqa: E402
from vllm.model_executor.layers.fused_moe import modular_kernel as mk  # noqa: E402
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as sums  # noqa: E402
from vllm.v1.worker import ubatching  # noqa: E402

import libep.vllm._standard  # noqa: E402
import libep.vllm._steps  # noqa: E402

RANK, SIZE = dist.get_rank(), dist.get_world_size()
new_empty = torch.Tensor.new_empty


def make_empty(*given, **named):
    """Memory without contents. Integers are 0, which is an expert's id."""
    made = new_empty(*given, **named)
    return made if made.is_floating_point() else made.zero_()


torch.Tensor.new_empty = make_empty
combine_rows = libep.vllm._steps.combine


def combine(step, rows, output):
    """ep.h: what a call writes overlaps nothing else. libep does not check it."""
    assert rows.data_ptr() != output.data_ptr()
    combine_rows(step, rows, output)


libep.vllm._steps.combine = combine


def make_inputs(rank, step, tokens, experts, top_k, hidden, moves=False, **_):
    """Tokens, weights and expert ids of a rank. moves: all tokens go to the next rank alone."""
    x, ids, weights = dense.inputs(100 * step + rank, tokens, hidden, experts, top_k)
    if moves:
        first = (rank + 1) % SIZE * (experts // SIZE)
        ids = (first + torch.arange(top_k, device=DEVICE)).repeat(tokens, 1)
    return x, weights, ids


def expect(x, weights, ids):
    return dense.layer(x, ids, weights).bfloat16()


def dequantise(rows, scales):
    if scales is None:
        return rows.float()
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)
    return rows.float() * scales.repeat_interleave(rows.shape[-1] // scales.shape[-1], dim=-1)


class Experts:
    """Experts of vLLM, to its modular kernel."""

    expects_unquantized_inputs = False

    def __init__(self, layer, leaves_sums, weighs_input):
        self.quant_config = layer.quant_config
        self.count = layer.experts_per_rank
        self.first = self.count * RANK
        self.weighs_input = weighs_input
        batched = mk.FusedMoEActivationFormat.BatchedExperts
        self.is_batched = layer.prepare_finalize.activation_format == batched
        self.leaves_sums = leaves_sums or self.is_batched

    def finalize_weight_and_reduce_impl(self):
        left, done = sums.TopKWeightAndReduceDelegate, sums.TopKWeightAndReduceNoOP
        return left() if self.leaves_sums else done()

    def run(self, rows, scales, meta, ids, weights):
        """Rows of the Standard format, or slabs; weights and sums as leaves_sums says."""
        if not rows.numel():
            return rows.bfloat16()
        x = dequantise(rows, scales)
        if self.is_batched:
            mine = factor(torch.arange(self.first, self.first + self.count, device=DEVICE))
            is_row = torch.arange(rows.shape[1], device=DEVICE) < meta.expert_num_tokens[:, None]
            return torch.where(is_row[..., None], x * mine[:, None, None], torch.nan).bfloat16()
        is_mine = (ids >= self.first) & (ids < self.first + self.count)
        terms = torch.where(is_mine[..., None], x[:, None] * factor(ids)[..., None], 0)
        if self.leaves_sums:
            return terms.bfloat16()
        weights = torch.where(is_mine, 1.0 if self.weighs_input else weights, 0)
        return (terms * weights[..., None]).sum(1).bfloat16()


def play(layer, experts, inputs, in_phases=True):
    """Dispatch, experts and combine, by vLLM's modular kernel, or each in one call."""
    x, weights, ids = inputs
    kernel = object.__new__(mk.FusedMoEKernelModularImpl)
    kernel.prepare_finalize, kernel.fused_experts = layer.prepare_finalize, experts
    output = torch.full_like(x, torch.nan)
    total = SIZE * experts.count
    given = x, weights, ids, total, None, experts.weighs_input
    if in_phases:
        rows, scales, meta, new_ids, new_weights = kernel._prepare(*given)
    else:
        rows, scales, meta, new_ids, new_weights = layer.prepare_finalize.prepare(
            *given, experts.quant_config, False
        )
        new_ids, new_weights = (ids, weights) if new_ids is None else (new_ids, new_weights)
    out = experts.run(rows, scales, meta, new_ids, new_weights)
    if out.shape == output.shape:
        out = output.copy_(out)  # as vLLM's kernel lets experts do
    ending = new_weights, new_ids, experts.weighs_input
    if in_phases:
        kernel._finalize(output, out, x, *ending, lambda *_: None, x)
    else:
        impl = experts.finalize_weight_and_reduce_impl()
        layer.prepare_finalize.finalize(output, out, *ending, impl)
    return output, meta, new_ids


def tell_tokens(counts):
    """What vLLM knows of a step: the tokens of all ranks."""
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts))
    return SimpleNamespace(dp_metadata=metadata)


def check_counts(meta, ids, experts, entries):
    """The counts and ids that experts get are those of all ranks' entries."""
    numbers = torch.arange(experts.first, experts.first + experts.count, device=DEVICE)
    expected = entries.flatten().eq(numbers[:, None]).sum(1)
    if not experts.is_batched:
        assert torch.equal(ids.flatten().eq(numbers[:, None]).sum(1), expected)
    if meta is None or meta.expert_num_tokens is None:
        return
    assert torch.equal(meta.expert_num_tokens.long(), expected)
    if meta.expert_num_tokens_cpu is not None:
        assert torch.equal(meta.expert_num_tokens_cpu.long(), expected.cpu())


def layers(backend, quant, steps, weighs_input=False, is_eager=False, is_capturing=False, **sizes):
    """A layer's steps equal a dense layer: at once and in phases, with and without local sums."""
    config.model_config.enforce_eager = is_eager
    needed = {name: size for name, size in sizes.items() if name != "moves"}
    layer = make_layer(config, backend, quant=quant, **needed)
    libep.vllm._standard.is_capturing = lambda _: is_capturing
    for number, counts in enumerate(steps):
        counts = counts[:SIZE]
        vllm.forward_context._forward_context = tell_tokens(counts)
        inputs = [make_inputs(r, number, n, **sizes) for r, n in enumerate(counts)]
        entries = torch.cat([ids for _, _, ids in inputs])
        for leaves_sums in (False, True):
            for in_phases in (False, True):
                experts = Experts(layer, leaves_sums, weighs_input)
                got, meta, ids = play(layer, experts, inputs[RANK], in_phases)
                assert torch.equal(got, expect(*inputs[RANK])), (number, leaves_sums, in_phases)
                check_counts(meta, ids, experts, entries)
    layer.manager.destroy()


def micro_batches(backend, steps, **sizes):
    """Two micro-batches, on threads that take turns as vLLM's do, through two layers."""
    all_counts = [counts[:SIZE] for counts in steps]
    config.model_config.enforce_eager = False
    made = [make_layer(config, backend, **sizes) for _ in range(2)]
    ready, wrong = threading.Barrier(3), []
    contexts = ubatching.make_ubatch_contexts(
        2, *make_streams(), [tell_tokens(counts) for counts in all_counts], ready
    )

    def run(number):
        inputs = make_inputs(RANK, number, all_counts[number][RANK], **sizes)
        expected = expect(*inputs)
        with contexts[number]:
            for layer in made:
                got, *_ = play(layer, Experts(layer, False, False), inputs)
                if not torch.equal(got, expected):
                    wrong.append((number, made.index(layer)))

    def guarded(number):
        try:
            if DEVICE == "cuda":
                torch.cuda.set_device(device)
            run(number)
        except BaseException as error:
            wrong.append(repr(error))
            ubatching._CURRENT_CONTEXTS[1 - number].cpu_wait_event.set()

    device = torch.cuda.current_device() if DEVICE == "cuda" else None
    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    for layer in made:
        layer.manager.destroy()


def names():
    from vllm.config.parallel import ParallelConfig

    assert libep.vllm.register()  # does nothing more
    wide = dict(enable_expert_parallel=True, data_parallel_size=2, tensor_parallel_size=2)
    wide["distributed_executor_backend"] = "mp"
    for backend in libep.vllm.BACKENDS:
        made = ParallelConfig(all2all_backend=backend, **wide)
        assert made.use_sequence_parallel_moe
        assert made.use_batched_dp_moe == (backend == "libep_batched")
        turns = ParallelConfig(all2all_backend=backend, enable_dbo=True, **wide)
        assert WholeConfig(turns).parallel_config.all2all_backend == backend
    try:
        ParallelConfig(all2all_backend="libep_other")
    except ValueError:
        return
    raise AssertionError("ParallelConfig takes any name")


def in_release(version):
    """What the log says where vLLM has another version."""
    said, log, here = [], logging.getLogger("vllm.libep"), vllm.__version__
    keep = said.append
    log.addFilter(lambda record: keep(record.getMessage()))
    vllm.__version__ = version
    assert not libep.vllm.register()
    vllm.__version__ = here
    log.filters.clear()
    return said[0]


def refused(what, **sizes):
    """The sentence of a refusal. `output`, where there is one, stays as it was."""
    layer = make_layer(config, "libep_batched" if "slabs" in what else "libep", **sizes)
    counts = [40 if "too_many" in what and "here" not in what else 5] * SIZE
    vllm.forward_context._forward_context = tell_tokens(counts)
    rows = 9 if what == "too_many_here" and RANK == 0 else counts[0]
    x, weights, ids = make_inputs(RANK, 0, rows, **sizes)
    output = torch.full_like(x, torch.nan)
    if what == "wrong_type":
        x = x.double()
    elif what == "wrong_ids":
        ids = ids.float()
    elif what == "wrong_output":
        output = output.float()
    weighs_input = what == "wrong_weight"
    try:
        if what == "no_gpu":
            make_communicator(type(layer.communicator).__mro__[1], "cpu")
        elif what == "elastic":
            type(layer.manager)(dist.group.WORLD, tcp_store_group=object())
        else:
            made, experts = layer.prepare_finalize, Experts(layer, False, weighs_input)
            given = (x, weights, ids, sizes["experts"], None, weighs_input, layer.quant_config)
            rows, scales, meta, ids, weights = made.prepare(*given)
            out = experts.run(rows, scales, meta, ids, weights)
            impl = experts.finalize_weight_and_reduce_impl()
            made.finalize(output, out, weights, ids, weighs_input, impl)
    except (EpError, TypeError, ValueError) as error:
        assert output.isnan().all()
        return str(error)
    raise AssertionError("it was not refused")
