# SPDX-License-Identifier: Apache-2.0
"""Programs for DeepEP on libep: through -m, in processes of a gloo process group."""

import os

import pytest
from conftest import DEEP_EP, HERE, need_gpus
from processes import check, finish, finish_all, free_port, good, spawn


def start(*arguments, is_fork=False, **environment):
    given = dict(GLOO_SOCKET_IFNAME="lo", LIBEP_SHARE_GPUS="yes", is_fork=is_fork)
    return spawn("-m", "libep.deep_ep", *arguments, **given, **environment)


def run_ranks(size, program, *options, **environment):
    end = str(size), str(free_port()), *options
    program = os.path.join(HERE, program)
    ranks = [(program, str(rank), *end) for rank in range(size)]
    return finish_all([start(*rank, is_fork=True, **environment) for rank in ranks], 300)


def test_program(nodes):
    """Both buffers equal dense layers and deep_ep.utils.refs, bit for bit, on three ranks."""
    need_gpus(3)  # a GPU for each rank, as DeepEP's init_dist has it
    check(run_ranks(3, "deep_ep_program.py"), ["equal\n", "", ""])


def test_a_rank_that_leaves():
    """The other one does not wait longer than its deadline, and says for whom."""
    need_gpus(2)
    results = run_ranks(2, "deep_ep_program.py", "early", LIBEP_TIMEOUT="3")
    (status, _, err), (other, _, text) = results
    assert other == 1 and "leaves early" in text
    assert status == 1 and "rank 1 did not arrive within 3 s" in err


SCRIPT = """
import multiprocessing, subprocess, sys, importlib.util
import deep_ep, deep_ep.utils
if __name__ != '__main__': sys.argv = sys.argv[:2]
assert sys.path[0] == sys.argv[1]
assert importlib.util.find_spec('deep_ep') is not None
print(deep_ep.__version__, sys.argv[2:], flush=True)
import helper
if len(sys.argv) > 2:
    spawned = multiprocessing.get_context('spawn').Process(target=helper.play)
    spawned.start(), spawned.join()
    sys.exit(spawned.exitcode or subprocess.call([sys.executable, *sys.argv[:2]]))
"""
HELPER = """
from deep_ep.utils import EventOverlap
from deep_ep.utils.envs import init_dist
from deep_ep import Buffer, Config, topk_idx_t
from deep_ep.buffer import Buffer as same, EventOverlap as event
from deep_ep_cpp import EventHandle
assert same is Buffer and event(EventHandle()) and Config(24, 8, 256)
import deep_ep.utils.math, libep.deep_ep.utils.math
assert deep_ep.utils.math is libep.deep_ep.utils.math
def play(): pass
"""


def test_running_programs(tmp_path):
    """Scripts, modules and processes that they start find deep_ep; arguments arrive."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    process = start(str(tmp_path / "script.py"), str(tmp_path), "--flag")
    out = good(finish(process)).splitlines()
    assert out[0].startswith("1.2.1+libep") and out[0].endswith("['--flag']")
    assert out[1:] == 2 * [out[0].replace("'--flag'", "")]


@pytest.mark.skipif(not DEEP_EP, reason="LIBEP_TEST_DEEP_EP names no folder with DeepEP's sources")
@pytest.mark.parametrize(
    "program", ["legacy/test_intranode.py", "legacy/test_low_latency.py", "elastic/test_ep.py"]
)
def test_deepep_own_tests(program):
    """DeepEP's own tests, as they are. Without GPUs "cuda" is the CPU there."""
    need_gpus(2)
    sizes = dict(num_processes=2, num_tokens=32, hidden=512, num_topk=4, num_experts=8)
    extra = []
    if program == "elastic/test_ep.py":
        # The sums of DeepEP and libep differ where a rank has several experts of its own token, and
        # DeepEP adds ranks in another order: docs/deep_ep.md.
        sizes.update(num_topk=2, num_experts=2)
        extra = ["--skip-perf-test", "--test-first-only"]
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    path = os.path.join(HERE, "cuda_on_cpus") + os.pathsep + os.getenv("PYTHONPATH", "")
    program = os.path.join(DEEP_EP, "tests", program)
    more = dict(MASTER_PORT=str(free_port()), PYTHONPATH=path)
    good(finish(start(program, *options, *extra, **more), 400))


def test_path_and_usage():
    folder = good(finish(start("--path", is_fork=True))).strip()
    assert os.path.exists(os.path.join(folder, "deep_ep", "__init__.py"))
    status, _, err = finish(start("-m", is_fork=True))
    assert status == 1 and "script.py ARGUMENTS" in err
