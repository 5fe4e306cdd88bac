#!/usr/bin/env python3
"""Makes the stubs of heed._core and heed.torch from the one that nanobind writes, so that neither has a list of
functions.

Usage: stubs.py STUB PACKAGE CORE TORCH. STUB is nanobind's, whose types are names of PACKAGE/_typing.py. CORE is STUB
with these names imported and with the fields of named tuples typed. TORCH has the exports of
PACKAGE/torch/__init__.py: functions and caches of heed on tensors, all mechanisms, and the names that it imports from
its own modules.
"""
import ast
import copy
import importlib.util
import sys
from pathlib import Path


def load_signatures(package):
    spec = importlib.util.spec_from_file_location("_signatures", package / "_signatures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions_of(body):
    return [node for node in body if isinstance(node, ast.FunctionDef)]


def names_in(node):
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def is_named_tuple(node):
    return isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["tuple"]


def all_arguments(node):
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def optional_arguments(node):
    """The names of arguments that may be None."""
    return {a.arg for a in all_arguments(node) if a.annotation and "None" in ast.unparse(a.annotation)}


def typed_tuple(node, functions):
    """A named tuple of gradients or of a state, whose fields nanobind knows by name alone. A gradient is None where
    what it is the gradient of may be; of keywords that the function only passes on, too."""
    returned_by = next((f for f in functions if f.returns and ast.unparse(f.returns) == node.name), None)
    given = {a.arg for a in all_arguments(returned_by)} - optional_arguments(returned_by) if returned_by else {"S", "z"}
    fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and not x.target.id.startswith("__")]
    result = copy.deepcopy(node)
    result.bases = [ast.Name("NamedTuple")]
    kinds = {name: "StateResult" if name == "dinitial_state" else "Result" for name in fields}
    kinds = {name: kind if name.removeprefix("d") in given else f"{kind} | None" for name, kind in kinds.items()}
    result.body = [node.body[0]] + [ast.parse(f"{name}: {kind}").body[0] for name, kind in kinds.items()]
    return result


def documented_first(functions):
    """Overloads have one docstring, which nanobind writes into the last."""
    last = {f.name: f for f in functions}
    for f in reversed(functions):
        if last[f.name] is not f:
            f.body, last[f.name].body, last[f.name] = last[f.name].body, f.body, f


def exported(path):
    """(names in __all__ as written, {name: module} of what is imported, docstring) of a package's __init__.py."""
    tree = ast.parse(path.read_text())
    names, modules = [], {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        if isinstance(node, ast.ImportFrom):
            modules.update((alias.name, node.module) for alias in node.names)
    return names, modules, ast.get_docstring(tree)


class OnTensors(ast.NodeTransformer):
    """Functions and caches of heed as those of heed.torch."""

    def __init__(self, signatures, body):
        functions = functions_of(body)
        self.signatures = signatures
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        # Mechanisms that processes divide, which are those with states but log_linear_attention.
        divided = {f.name for f in functions if any(a.arg == "comm" for a in f.args.kwonlyargs)}
        self.with_states = divided & {f.name.removesuffix("_step") for f in functions if f.name.endswith("_step")}
        self.own_results = ({f.name.removesuffix("_backward") for f in functions if f.name.endswith("_backward")}
                            - {"attention"})

    def convert(self, annotation, name=""):
        return ast.parse(self.signatures.on_tensors(ast.unparse(annotation), name), mode="eval").body

    def visit_FunctionDef(self, node):
        """Functions with a gradient allocate their results: only attention takes `out`, without a gradient."""
        node = copy.deepcopy(node)
        for_processes = (self.signatures.ATTENTION_OF_ARRAYS if node.name == "attention"
                         else self.signatures.STATES_OF_ARRAYS if node.name in self.with_states else ())
        of_arrays = (*for_processes, *(["out"] if node.name in self.own_results else []))
        kept = [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults) if a.arg not in of_arrays]
        node.args.kwonlyargs, node.args.kw_defaults = [a for a, _ in kept], [d for _, d in kept]
        if for_processes and ast.get_docstring(node):
            docstring = node.body[0].value
            docstring.value = self.signatures.without_arguments(docstring.value, for_processes)
        keywords = (self.signatures.ATTENTION_IN_A_GROUP if node.name == "attention"
                    else self.signatures.CACHE_IN_A_GROUP if node.name == "attend" and self.divides
                    else self.signatures.STATES_IN_A_GROUP if node.name in self.with_states else ())
        for name, annotation, default in keywords:
            node.args.kwonlyargs.append(ast.arg(name, ast.parse(annotation, mode="eval").body))
            node.args.kw_defaults.append(ast.Constant(default))
        for argument in all_arguments(node):
            if argument.annotation:
                argument.annotation = self.convert(argument.annotation, argument.arg)
        if node.returns:
            node.returns = (ast.parse("torch.dtype", mode="eval").body if node.name == "dtype"
                            else self.convert(node.returns))
        return node

    def visit_ClassDef(self, node):
        """A subclass of heed's, with what it and its base have on arrays."""
        inherited = [f for base in node.bases for f in functions_of(self.classes[ast.unparse(base)].body)]
        own = {getattr(x, "name", "") for x in node.body}
        node = copy.deepcopy(node)
        self.divides = "append" in own | {f.name for f in inherited} and node.name != "NSACache"
        node.bases = [ast.parse(f"heed.{node.name}", mode="eval").body]
        node.body += [f for f in inherited if f.name not in own]
        node.body = [self.visit_FunctionDef(x) if isinstance(x, ast.FunctionDef) else x for x in node.body]
        return node


def imports(body, names):
    """`from heed._typing import` of those names that are used."""
    used = sorted(set().union(*map(names_in, body)) & names)
    return [ast.parse(f"from heed._typing import {', '.join(used)}").body[0]] if used else []


def main():
    stub, package, core, torch = map(Path, sys.argv[1:])
    types = {node.target.id if isinstance(node, ast.AnnAssign) else node.name
             for node in ast.parse((package / "_typing.py").read_text()).body
             if isinstance(node, (ast.AnnAssign, ast.ClassDef))}
    docstring, *body = ast.parse(stub.read_text()).body
    functions = functions_of(body)
    documented_first(functions)
    body = [typed_tuple(node, functions) if is_named_tuple(node) else node for node in body]
    heads = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    body = [node for node in body if node not in heads]
    heads = [node for node in heads if "_collections" not in ast.unparse(node)]
    heads.append(ast.parse("from typing import NamedTuple").body[0])
    core.write_text(ast.unparse(ast.fix_missing_locations(ast.Module([docstring, *heads, *imports(body, types), *body],
                                                                     []))) + "\n")

    names, modules, text = exported(package / "torch/__init__.py")
    known = {f.name for f in functions}
    mechanisms = {f.removesuffix("_backward") for f in known if f.endswith("_backward")}
    shown = set(names) | {f for f in known if f in mechanisms or f.removesuffix("_step") in mechanisms}
    on_tensors = OnTensors(load_signatures(package), body)
    body = [on_tensors.visit(node) for node in body if getattr(node, "name", None) in shown]
    written = {node.name for node in body}
    own = [f"from {modules[name]} import {name} as {name}" for name in names if name not in written]
    heads += ast.parse("\n".join(["import heed", "import torch", "from heed import Pattern", "from torch import Tensor",
                                  "from torch.distributed import ProcessGroup",
                                  "from torch.distributed.device_mesh import DeviceMesh",
                                  *own])).body
    every = ast.parse(f"__all__ = {sorted({*names, *written})}").body
    doc = ast.Expr(ast.Constant(text))
    torch.write_text(ast.unparse(ast.fix_missing_locations(ast.Module([doc, *heads, *imports(body, types), *every,
                                                                       *body], []))) + "\n")


if __name__ == "__main__":
    main()
