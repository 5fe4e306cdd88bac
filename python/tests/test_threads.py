# heed beside other threads and processes: the GIL, several callers at once, fork, settings.
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from at_once import holds_in_a_child, needs_fork, others_run_during, run_at_once

import heed


def problem(seed, T=96, H=4, D=16):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, T, H, D), dtype=np.float32) for _ in range(3)]


def test_several_python_threads_at_once():
    problems = [problem(seed, T=40 + 17 * seed) for seed in range(6)]
    expected = [heed.attention(*p, causal=True, threads=1) for p in problems]

    def work(offset):
        for i in range(30):
            n = (i + offset) % len(problems)
            o = heed.attention(*problems[n], causal=True, threads=1 + (i + offset) % 3)
            np.testing.assert_array_equal(o, expected[n])

    run_at_once(*(partial(work, offset) for offset in range(4)))


def test_other_threads_run_during_a_call():
    q, k, v = problem(0, T=2048, H=8, D=64)
    assert others_run_during(lambda: heed.attention(q, k, v, threads=1))


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_works_in_a_forked_child():
    q, k, v = problem(3, T=300)
    expected = heed.attention(q, k, v, threads=3)  # the pool has threads now
    assert holds_in_a_child(
        lambda: all(np.array_equal(heed.attention(q, k, v, threads=n), expected) for n in (1, 3, 2)))
    np.testing.assert_array_equal(heed.attention(q, k, v, threads=3), expected)


def test_number_of_threads():
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert heed.get_num_threads() == usable
    heed.set_num_threads(3)
    assert heed.get_num_threads() == 3
    heed.set_num_threads(None)
    assert heed.get_num_threads() == usable


COUNT_THREADS = """
import os
import numpy as np
import heed

q = np.ones((1, 300, 4, 8), "f4")
count = lambda: len(os.listdir("/proc/self/task"))
heed.attention(q, q, q, threads=1)
before = count()
{use}
print(count() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc")
@pytest.mark.parametrize("use", ["heed.attention(q, q, q, threads=3)",
                                 "heed.set_num_threads(3); heed.attention(q, q, q)"])
def test_a_call_has_the_threads_that_it_is_given(use):
    code = COUNT_THREADS.format(use=use)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("2\n", "")  # besides the caller's


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_the_affinity_mask_is_asked_when_it_matters():
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(mask)])
        assert heed.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, mask)
    assert heed.get_num_threads() == len(mask)


def test_exit_while_the_pool_sleeps_is_clean():
    code = "import heed, numpy as np; q = np.ones((1, 300, 4, 8), 'f4'); heed.attention(q, q, q, threads=4)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


AT_EXIT = """
import sys, threading, time
import numpy as np
import heed

q = np.ones((1, 64, 2, 16), "f4")
cache = heed.KVCache(1, 2, 16)
cache.append(q, q)
try:
    import ml_dtypes
    bf16 = np.zeros((64, 64), ml_dtypes.bfloat16)
except ImportError:
    bf16 = None
begun = threading.Barrier(5)

class Slow:  # gives the GIL away
    def __dlpack__(self, **options):
        sum(range(1000))
        return q.__dlpack__(**options)
    def __dlpack_device__(self):
        sum(range(1000))
        return q.__dlpack_device__()

slow = Slow()

def use():
    {call}
    begun.wait()
    while True:
        {call}

for _ in range(4):
    threading.Thread(target=use, daemon=True).start()
begun.wait()
time.sleep({seconds})
"""


@pytest.mark.parametrize("call", [
    "heed.attention(q, q, q, threads=1)",
    "heed.attention(q, q, q, threads=3, key_lengths=[64])",
    "heed.gla(q, q, q, q - 1, threads=2)",
    "cache.attend(q)",
    "cache.trim([64]); cache.append(q, q)",
    "cache.fork().lengths",
    "heed.KVCache.import_pages(q, q, [0, 1], [0], [64])",
    "heed.attention_backward(q, q, q, q, q, q[..., 0].transpose(0, 2, 1), threads=1)",
    "heed.gla_backward(q, q, q, q, q - 1, threads=1)",
    "heed.attention(slow, slow, slow, threads=1)",
    "heed.attention(q, q, q, sinks=[0.0, 0.0], bias=bf16, threads=1)",
])
def test_exit_while_daemon_threads_are_inside_is_clean(call):
    for seconds in (0, 0.01, 0.02):
        code = AT_EXIT.format(call=call, seconds=seconds)
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, result.stderr) == (0, "")
