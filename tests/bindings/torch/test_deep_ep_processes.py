# SPDX-License-Identifier: Apache-2.0
"""Programs for DeepEP on libep: through -m, in processes of a gloo process group."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import DEEP_EP, DEVICE, HERE
from processes import finish, finish_all, free_port, good, spawn

PROGRAM = os.path.join(HERE, "deep_ep_program.py")


def start(*arguments, **environment):
    return spawn(*arguments, GLOO_SOCKET_IFNAME="lo", LIBEP_SHARE_GPUS="yes", **environment)


def run_ranks(size, *options, **environment):
    end = str(size), str(free_port()), DEVICE, *options
    program = "-m", "libep.deep_ep", PROGRAM
    return finish_all([start(*program, str(r), *end, **environment) for r in range(size)], 120)


def test_program(nodes):
    """A layer with gradients equals a dense one, bit for bit, on two ranks."""
    outs = [good(result) for result in run_ranks(2)]
    assert outs == ["rank 0: equal\n", "rank 1: equal\n"]


def test_elastic_program():
    """ElasticBuffer equals the references of deep_ep.utils.refs, on three ranks."""
    end = "3", str(free_port())
    program = "-m", "libep.deep_ep", os.path.join(HERE, "elastic_program.py")
    results = finish_all([start(*program, str(rank), *end) for rank in range(3)], 120)
    assert [good(result) for result in results] == ["equal\n", "", ""]


def test_a_rank_that_leaves():
    """The other one does not wait longer than its deadline, and says for whom."""
    (status, _, err), (other, _, text) = run_ranks(2, "early", LIBEP_TIMEOUT="3")
    assert other == 1 and "leaves early" in text
    assert status == 1 and "rank 1 did not arrive within 3 s" in err


def test_running_programs(tmp_path):
    """Scripts, modules and processes that they start find deep_ep; arguments arrive."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, subprocess, sys, importlib.util\n"
        "import deep_ep, deep_ep.utils\n"
        "if __name__ != '__main__': sys.argv = sys.argv[:2]\n"
        "assert sys.path[0] == sys.argv[1]\n"
        "assert importlib.util.find_spec('deep_ep') is not None\n"
        "print(deep_ep.__version__, sys.argv[2:], flush=True)\n"
        "import helper\n"
        "if len(sys.argv) > 2:\n"
        "    spawned = multiprocessing.get_context('spawn').Process(target=helper.play)\n"
        "    spawned.start(), spawned.join()\n"
        "    sys.exit(spawned.exitcode or subprocess.call([sys.executable, *sys.argv[:2]]))\n"
    )
    (tmp_path / "helper.py").write_text(
        "from deep_ep.utils import EventOverlap\n"
        "from deep_ep.utils.envs import init_dist\n"
        "import deep_ep.utils.math, libep.deep_ep.utils.math\n"
        "assert deep_ep.utils.math is libep.deep_ep.utils.math\n"
        "def play(): pass\n"
    )
    process = start("-m", "libep.deep_ep", str(script), str(tmp_path), "--flag")
    out = good(finish(process, 60)).splitlines()
    assert out[0].startswith("1.2.1+libep") and out[0].endswith("['--flag']")
    assert out[1:] == 2 * [out[0].replace("'--flag'", "")]


@pytest.mark.skipif(not DEEP_EP, reason="LIBEP_TEST_DEEP_EP names no folder with DeepEP's sources")
@pytest.mark.parametrize(
    "program", ["legacy/test_intranode.py", "legacy/test_low_latency.py", "elastic/test_ep.py"]
)
def test_deepep_own_tests(program):
    """DeepEP's own tests, as they are. Without GPUs "cuda" is the CPU there."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    sizes = dict(processes=2, tokens=32, hidden=512, topk=4, experts=8)
    options = [word for name, size in sizes.items() for word in (f"--num-{name}", str(size))]
    options[options.index("--num-hidden")] = "--hidden"
    if program == "elastic/test_ep.py":
        # The sums of DeepEP and libep differ where a rank has several experts of its own token, and
        # DeepEP adds ranks in another order: docs/deep_ep.md.
        options[options.index("--num-topk") + 1] = options[options.index("--num-experts") + 1] = "2"
        options += ["--skip-perf-test", "--test-first-only"]
    process = start(
        "-m",
        "libep.deep_ep",
        os.path.join(DEEP_EP, "tests", program),
        *options,
        MASTER_PORT=str(free_port()),
        PYTHONPATH=os.path.join(HERE, "cuda_on_cpus") + os.pathsep + os.getenv("PYTHONPATH", ""),
    )
    good(finish(process, 400))


def test_path_and_usage():
    shown = start("-m", "libep.deep_ep", "--path")
    usage = start("-m", "libep.deep_ep", "-m")
    folder = good(finish(shown, 60)).strip()
    assert os.path.exists(os.path.join(folder, "deep_ep", "__init__.py"))
    status, _, err = finish(usage, 60)
    assert status == 1 and "script.py ARGUMENTS" in err
