# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/torch.md and of README.md, as they stand there."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap

import torch
from conftest import HERE, make_group, run_threads
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import libep
import libep.torch as ep

with open(os.path.join(HERE, "../../../docs/torch.md")) as page:
    PROGRAMS = [
        textwrap.dedent(found)
        for found in re.findall(r"^ *```python\n(.*?)^ *```", page.read(), re.S | re.M)
    ]


def test_first_program():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[0]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    # The ranks are threads: a line of one may end within that of the other.
    assert sorted(re.findall(r"rank \d: .*?gradient 10", done.stdout)) == [
        "rank 0: 6 rows came, y 10, gradient 10",
        "rank 1: 6 rows came, y 20, gradient 10",
    ]


def test_readme():
    with open(os.path.join(HERE, "../../../README.md")) as page:
        program = re.search(r"```python\n(.*?)```", page.read(), re.S).group(1)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = ["rank 0: y 10, gradient 10", "rank 1: y 10, gradient 10"]
    assert sorted(done.stdout.splitlines()) == lines


def test_selective_checkpoint():
    def body(bootstrap):
        with make_group(bootstrap) as group:
            handle = ep.Handle(group)
            topk_idx = torch.tensor([[0, 5]] * 3, device=group.device)
            weights = torch.full((3, 2), 0.5, device=group.device)

            def layer(x):
                received = ep.dispatch(handle, x, topk_idx, weights)
                rows = 3 * received.tokens
                return ep.combine(handle, received.plan, rows, received.topk_weights)

            x = torch.ones(3, 16, device=group.device, requires_grad=True)
            names = {"functools": functools, "libep": libep, "layer": layer, "x": x}
            names["checkpoint"] = checkpoint
            names["create_selective_checkpoint_contexts"] = create_selective_checkpoint_contexts
            exec(PROGRAMS[1], names)
            names.pop("y").sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, 3))

    run_threads(2, body)


def test_receive_memory():
    def body(bootstrap):
        with make_group(bootstrap, dtype=torch.bfloat16) as group:
            layer, rows, hidden = ep.Handle(group), 16, 16
            tokens = torch.ones(3, 16, dtype=torch.bfloat16, device=group.device)
            topk_idx = torch.tensor([[0, 5]] * 3, device=group.device)
            weights = torch.full((3, 2), 0.5, device=group.device)
            names = dict(locals(), libep=libep, torch=torch)
            exec(PROGRAMS[2], names)
            received = names.pop("received")
            out = ep.combine(layer, received.plan, received.tokens, received.topk_weights)
            assert torch.equal(out, tokens)
            assert received.tokens.data_ptr() == names.pop("recv").data_ptr()
            del received

    run_threads(2, body)


def test_two_phases():
    def body(bootstrap):
        with make_group(bootstrap, mode=libep.Mode.LATENCY) as group:
            layer = ep.Handle(group, layout=libep.Layout.BATCHED, rows_per_expert=16)
            x = torch.ones(3, 16, device=group.device)
            topk_idx = torch.tensor([[0, 5]] * 3, device=group.device)
            weights = torch.full((3, 2), 0.5, device=group.device)
            shared_expert, experts = torch.neg, lambda rows, counts: 3 * rows
            names = dict(locals(), libep=libep, torch=torch)
            exec(PROGRAMS[3], names)
            assert torch.equal(names["out"], 2 * x) and torch.equal(names["shared"], -x)

    run_threads(2, body)


def test_every_program_is_run():
    assert len(PROGRAMS) == 4
