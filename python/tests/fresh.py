"""Python programs in processes of their own that do not import PyTorch again: forks of a process that has imported it
and nothing of heed. It does not suit programs that must not find PyTorch imported, or modules that read the environment
at import."""
import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
PACKAGES = ("numpy", "torch")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


_servers = {}


def _stop(server):
    server.stdin.close()
    server.wait()


def _server(packages):
    if packages not in _servers:
        _servers[packages] = subprocess.Popen([sys.executable, __file__, *packages],
                                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                              env={**os.environ, "OMP_WAIT_POLICY": "passive"})
        atexit.register(_stop, _servers[packages])
    return _servers[packages]


def python(program, *arguments, packages=(), cwd=None, env=None, timeout=300):
    """Runs a file, or code if it is a string, as `python program arguments` would: its status and what it wrote.
    `packages`: that are imported already besides NumPy and PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"code" if isinstance(program, str) else "file": str(program),
                   "arguments": [str(x) for x in arguments], "cwd": str(cwd or os.getcwd()),
                   "env": dict(os.environ if env is None else env), "out": str(out), "err": str(err),
                   "timeout": timeout}
        server = _server((*PACKAGES, *packages))
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that imported PyTorch is gone"
        if json.loads(answer) is None:
            raise subprocess.TimeoutExpired([str(program)], timeout, out.read_text(), err.read_text())
        return Done(json.loads(answer), out.read_text(), err.read_text())


def _wait(pid, seconds):
    """The child's status, or None after so many seconds."""
    deadline = time.monotonic() + seconds
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(done[1])


def _serve():
    """Answers requests; returns in each child, with what that is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        if pid := os.fork():
            print(json.dumps(_wait(pid, request["timeout"])), flush=True)
            continue
        for number, file, flags in ((0, os.devnull, os.O_RDONLY), (1, request["out"], os.O_WRONLY | os.O_CREAT),
                                    (2, request["err"], os.O_WRONLY | os.O_CREAT)):
            opened = os.open(file, flags, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        return request
    return None


def _become(request):
    """Sets environment, folder, arguments and path as Python starts a process; gives the code and its namespace."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    file = request.get("file")
    sys.argv = [file or "-c", *request["arguments"]]
    added = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and x not in sys.path]
    sys.path[:1] = [str(Path(file).resolve().parent) if file else "", *added]
    warnings.filterwarnings("error", module=r"(__main__|heed)(\.|$)")  # as in conftest.py
    main = type(sys)("__main__")
    if file:
        main.__file__ = file
    sys.modules["__main__"] = main
    code = Path(file).read_text() if file else request["code"]
    return compile(code, file or "<string>", "exec"), main.__dict__


if __name__ == "__main__":
    import importlib

    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "transformers" in sys.argv:
        from transformers import AutoModel, AutoTokenizer, masking_utils, modeling_utils  # noqa: F401
    gc.freeze()  # children need not copy what is only looked through for garbage
    request = _serve()
    if request is not None:
        exec(*_become(request))  # and ends as a program ends
