"""Runs a program for WASI with wasmtime: run.py PROGRAM ARGUMENT...

All folders of this machine and the environment are the program's. The code that wasmtime compiles stays beside the
program, with the suffix .cwasm, and is compiled again where the program is newer.
"""
import importlib.metadata
import os
import sys

import wasmtime


def load(engine: wasmtime.Engine, path: str) -> wasmtime.Module:
    compiled = path + f".{importlib.metadata.version('wasmtime')}.cwasm"
    if os.path.exists(compiled) and os.path.getmtime(compiled) >= os.path.getmtime(path):
        return wasmtime.Module.deserialize_file(engine, compiled)
    module = wasmtime.Module.from_file(engine, path)
    part = f"{compiled}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(module.serialize())
    os.replace(part, compiled)
    return module


def main(path: str, arguments: list[str]) -> int:
    config = wasmtime.Config()
    config.wasm_exceptions = True
    engine = wasmtime.Engine(config)
    wasi = wasmtime.WasiConfig()
    wasi.argv = [os.path.basename(path), *arguments]
    wasi.env = list({**os.environ, "PWD": os.getcwd()}.items())  # see absent_calls.c
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    wasi.preopen_dir("/", "/")
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    store = wasmtime.Store(engine)
    store.set_wasi(wasi)
    instance = linker.instantiate(store, load(engine, path))
    try:
        instance.exports(store)["_start"](store)
    except wasmtime.ExitTrap as trap:
        return trap.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
