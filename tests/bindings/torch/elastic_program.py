# SPDX-License-Identifier: Apache-2.0
"""A program for DeepEP's ElasticBuffer, that compares it with deep_ep.utils.refs.

elastic_program.py RANK SIZE PORT
"""

import os
import sys

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.utils.envs import dist_print, get_logical_domain_size, init_dist
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data, ordered_accumulate

BOUND, HIDDEN, TOP_K = 20, 144, 3


def main(rank, size, port):
    os.environ["MASTER_PORT"] = port
    rank, size, group = init_dist(int(rank), int(size), 7)
    assert deep_ep.ElasticBuffer is ElasticBuffer
    assert get_logical_domain_size(group) == deep_ep.get_physical_domain_size(group) == (1, size)
    experts, tokens = 2 * size, BOUND - 3 * rank
    device = "cuda" if torch.cuda.is_available() else "cpu"
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=BOUND, hidden=HIDDEN, num_topk=TOP_K)
    for ratio, precise in ((1.0, False), (2.0, False), (2.0, True)):
        scores = get_unbalanced_scores(tokens, experts, size, TOP_K, ratio, precise)
        weights, idx = scores.topk(TOP_K, 1)
        idx[::4, 1] = -1
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        rx, ridx, rweights, handle, _ = buffer.dispatch(x, idx, weights, num_experts=experts)
        ref_x, ref_idx, ref_weights, numbers, counts = dispatch(x, idx, weights, BOUND, experts)
        assert torch.equal(rx, ref_x) and torch.equal(ridx, ref_idx)
        assert torch.equal(rweights, ref_weights.masked_fill(ref_idx < 0, 0))
        assert torch.equal(handle.recv_src_metadata[:, 0], numbers)
        sums = handle.psum_num_recv_tokens_per_scaleup_rank
        assert sums.tolist() == counts.cumsum(0).tolist()
        rows = generate_pre_combine_data(numbers, BOUND, TOP_K, HIDDEN)
        rows[ridx < 0] = 0
        out = buffer.combine(ordered_accumulate(rows), handle)[0]
        mine = torch.arange(rank * BOUND, rank * BOUND + tokens, device=device)
        rows = generate_pre_combine_data(mine, BOUND, TOP_K, HIDDEN)
        rows[idx < 0] = 0
        assert torch.equal(out, combine(rows, idx, 1, size, experts, None, True, False))
    buffer.destroy()
    dist_print("equal" if rank == 0 else "", once_in_node=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
