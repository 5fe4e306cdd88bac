"""Calls in several threads at once, beside another thread, and in a forked process."""
import os
import threading
import time

import pytest

SECONDS_OF_A_CHILD = 60

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def run_at_once(*works):
    """Calls each in a thread of its own; raises what one of them raised."""
    failures = []

    def run(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def others_run_during(call, meanwhile=lambda: None):
    """Returns whether another thread runs, and may call `meanwhile`, in the middle of call()."""
    called, ticks = threading.Event(), []

    def tick():
        while not called.is_set():
            ticks.append(time.perf_counter())
            meanwhile()
            time.sleep(0.001)

    def in_the_middle():
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
        margin = (end - begin) / 4
        return any(begin + margin < t < end - margin for t in ticks)

    seen = []

    def try_it():
        try:
            seen.append(any(in_the_middle() for _ in range(20)))  # until one call is long enough to tell
        finally:
            called.set()

    run_at_once(tick, try_it)
    return seen[0]


def holds_in_a_child(check):
    """Returns whether check() is true in a forked process; a process that hangs is killed and fails the test."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:  # an exception of check() must not continue as a second run of the tests
            os._exit(2)
    deadline = time.monotonic() + SECONDS_OF_A_CHILD
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(done[1]) == 0
