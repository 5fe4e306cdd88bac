# Tests of the output of `heed completion`, in the shells that read it.
import os
import pty
import re
import shutil
import subprocess
import time

import pytest
from cli_program import VERBS, document, heed, needs_program, refused

pytestmark = [needs_program, pytest.mark.skipif(not shutil.which("bash"), reason="no bash")]

SHELLS = ["bash", "zsh"]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(heed("completion", shell).stdout)
    return folder


def complete(scripts, line, cwd="."):
    """The completions that bash offers at the end of a line, by the function that `complete` registered."""
    words = line.split(" ")
    code = """source "$1"; shift
        read -r _ _ function _ < <(complete -p heed)
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        $function
        printf '%s\\n' "${COMPREPLY[@]}" """
    done = subprocess.run(["bash", "-c", code, "bash", scripts / "bash", *words], capture_output=True, text=True,
                          check=True, cwd=cwd)
    assert done.stderr == ""
    return [word for word in done.stdout.split("\n") if word]


def mechanisms():
    return [op["name"] for op in document("list")]


def options_in_help(verb):
    """The options that a verb's own help lists."""
    text = heed(verb, "--help").stdout.split("\nOptions:")[1].split("\n\n")[0]
    return {name for names in re.findall(r"^  (-\S+)", text, re.M) for name in names.split(",")}


def test_every_verb_and_option_is_offered(scripts):
    verbs = [*VERBS, "completion"]
    assert complete(scripts, "heed ") == verbs and complete(scripts, "heed ver") == ["verify"]
    for verb in verbs:
        assert set(complete(scripts, f"heed {verb} -")) == options_in_help(verb), verb
    assert complete(scripts, "heed --v") == ["--version"]


@pytest.mark.parametrize("line, expected", [
    ("heed run linear", ["linear_attention"]),
    ("heed verify attention retent", ["retention"]), ("heed bench --threads 2 ret", ["retention"]),
    ("heed run attention x.safetensors --dtype b", ["bf16"]), ("heed run --dtype f64 retent", ["retention"]),
    ("heed compare x -m attention,linear_", ["attention,linear_attention"]), ("heed compare -m ret", ["retention"]),
    ("heed info --isa avx5", ["avx512"]), ("heed completion z", ["zsh"]), ("heed run attention x --scale ", []),
    ("heed nonsense x", []), ("heed list x", [])])
def test_values(scripts, line, expected):
    assert complete(scripts, line) == expected


def test_mechanisms_are_those_of_the_program(scripts):
    for line in ("heed run ", "heed verify ", "heed bench gla "):
        assert complete(scripts, line) == mechanisms()


def test_files(scripts, tmp_path):
    (tmp_path / "a b.safetensors").touch()
    for line in ("heed run attention a", "heed compare a", "heed view a", "heed run attention x -o a",
                 "heed view x --html a"):
        assert complete(scripts, line, cwd=tmp_path) == ["a b.safetensors"]


def test_a_real_bash_completes_at_a_tab(scripts):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"],
                   {**os.environ, "INPUTRC": "/dev/null", "TERM": "dumb"})
    said = b""
    for line in (f"source {scripts / 'bash'}", "heed() { printf '<%s>' \"$@\"; }",
                 "heed veri\tlinear_a\t--dty\tbf\t; echo end'ed'"):
        os.write(terminal, line.encode() + b"\n")
    end = time.monotonic() + 30
    while b"ended" not in said and time.monotonic() < end:
        said += os.read(terminal, 4096)
    os.write(terminal, b"exit\n")
    os.close(terminal)
    os.waitpid(pid, 0)
    assert "<verify><linear_attention><--dtype><bf16>" in said.decode()


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_well_formed(scripts, shell):
    """Without zsh, bash checks that the quotes, brackets and cases of its script close; their meaning is not tested."""
    reader = shutil.which(shell) or "bash"
    done = subprocess.run([reader, "-n", scripts / shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_zsh_script_has_every_verb_and_option(scripts):
    text = (scripts / "zsh").read_text()
    assert text.startswith("#compdef heed\n")
    cases = dict(re.findall(r"^    (\w+)\)\n      _arguments((?:.*\\\n)*.*);;$", text, re.M))
    assert set(cases) == {*VERBS, "completion"}
    for verb, specs in cases.items():
        given = set(re.findall(r"^ +'(-[^\[']+)\[", specs, re.M)) | {
            name for names in re.findall(r"^ +'\([^)]*\)'\{([^}]*)\}'", specs, re.M) for name in names.split(",")}
        assert given == options_in_help(verb), verb
    assert f":MECHANISM:({' '.join(mechanisms())})" in cases["run"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
def test_zsh_registers_it(scripts):
    code = "autoload -Uz compinit; compinit -D; source $1; print $_comps[heed]"
    done = subprocess.run(["zsh", "-f", "-c", code, "zsh", scripts / "zsh"], capture_output=True, text=True, check=True)
    assert done.stdout == "_heed\n" and done.stderr == ""


def test_another_shell_is_refused():
    assert "shell is 'fish', expected bash or zsh" in refused(2, "completion", "fish")
    assert "SHELL is required" in refused(2, "completion")
