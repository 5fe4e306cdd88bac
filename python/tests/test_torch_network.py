# Two processes with a slow network between them, and one whose network ends. They are in two network namespaces, which
# needs root: HEED_TEST_NETWORK=1 runs these tests (scripts/test --deep).
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if os.environ.get("HEED_TEST_NETWORK") != "1":
    pytest.skip("HEED_TEST_NETWORK is not 1", allow_module_level=True)
if not shutil.which("ip") or not shutil.which("tc"):
    pytest.skip("iproute2 is not installed", allow_module_level=True)
if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
    pytest.skip("this user may not make network namespaces", allow_module_level=True)

WORKER = Path(__file__).with_name("network_worker.py")
ADDRESSES = "10.231.77.1", "10.231.77.2"
DELAY, RATE = 0.01, 100e6 / 8  # seconds and bytes per second of one direction
TIMEOUT = 6


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True)


class Network:
    """Two network namespaces with a cable between them."""

    def __init__(self):
        self.names = [f"heed{os.getpid()}{side}" for side in "ab"]
        self.devices = [f"hd{os.getpid()}{side}" for side in "ab"]

    def build(self):
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for name, device, address in zip(self.names, self.devices, ADDRESSES):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def slow_down(self):
        for name, device in zip(self.names, self.devices):
            done = subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", device, "root", "netem", "delay",
                                   f"{DELAY * 1e3}ms", "rate", f"{RATE * 8 / 1e6}mbit", "limit", "100000"],
                                  stderr=subprocess.PIPE, text=True)
            if "unknown" in done.stderr:
                pytest.skip("the kernel has no netem")
            assert done.returncode == 0, done.stderr

    def speed_up(self):
        for name, device in zip(self.names, self.devices):
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], check=True)

    def cut(self):
        ip("-n", self.names[0], "link", "set", self.devices[0], "down")

    def start(self, check, **more):
        """The two processes."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HEED_THREADS": "1"} | more
        return [subprocess.Popen(["ip", "netns", "exec", name, sys.executable, WORKER, check, str(rank),
                                  f"{ADDRESSES[0]}:29517", str(TIMEOUT if check == "until_the_end" else 300)],
                                 env=environment | {"GLOO_SOCKET_IFNAME": device}, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
                for rank, (name, device) in enumerate(zip(self.names, self.devices))]


@pytest.fixture
def network():
    built = Network()
    try:
        built.build()
        yield built
    finally:
        for name in built.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)  # and the device in it


def outputs(processes, seconds):
    try:
        texts = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (out, error)) in enumerate(zip(processes, texts)):
        assert process.returncode == 0, f"rank {rank}:\n{out[-2000:]}\n{error[-4000:]}"
    return [[json.loads(line) for line in out.splitlines()] for out, _ in texts]


def test_a_slow_network_changes_no_result_and_takes_the_time_of_its_bytes(network):
    def measured():
        return {(row["name"], row["overlaps"]): row["seconds"]
                for row in outputs(network.start("measure"), 500)[0]}

    network.slow_down()
    slow = measured()
    network.speed_up()
    fast = measured()
    row = 8 * 64 * 4 * 2048 // 2  # bytes of the tokens of a rank in q, k, v or o
    for name, passes, messages in (("all_gather", 4, 2 + 2 + 2), ("ulysses", 4, 2 + 5 + 4), ("ring", 8, 2 + 2 + 6)):
        predicted = fast[name, True] + passes * row / RATE + messages * DELAY
        got = slow[name, name != "ring"]
        print(f"{name}: {got:.3f} s, {predicted:.3f} predicted, {fast[name, True]:.3f} without a delay")
        assert abs(got / predicted - 1) < 0.2, (name, got, predicted)
    print(f"ring: {slow['ring', True]:.3f} s with messages during computation, {slow['ring', False]:.3f} without")
    print(f"gated_delta_rule: {slow['gated_delta_rule', True]:.3f} s, {fast['gated_delta_rule', True]:.3f} without")


@pytest.mark.parametrize("method", ["all_gather", "ring", "gated_delta_rule"])
def test_a_network_that_ends_is_an_error_within_the_timeout(network, method):
    processes = network.start("until_the_end", HEED_METHOD=method)
    for process in processes:
        line = process.stdout.readline()
        assert "ready" in line, line + process.stderr.read()
    network.cut()
    for (last,) in outputs(processes, 4 * TIMEOUT + 30):
        assert last["raised"] and last["seconds"] < 2 * TIMEOUT + 5, last
