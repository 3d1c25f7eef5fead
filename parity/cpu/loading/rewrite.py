"""Reads Python source so that where it says ``cuda`` the CPU is meant, as rewrites of its syntax tree.

=====================================  =====================================  =======================================
written                                is read as                             because
=====================================  =====================================  =======================================
``"cuda"``                             ``"cpu"``                              devices in arguments and comparisons
``torch.version.cuda``                 the emulated GPU's CUDA version        what is available depends on it
``torch.cuda``                         ``parity.cpu.cuda``                    streams, properties, generators
``torch.device("cuda", index)``        ``torch.device("cpu")``                CPU tensors carry no index
``tensor.is_cuda``                     ``tensor.is_cpu``                      "is this where the kernels run?"
``tensor.cuda()``                      ``tensor.cpu()``                       ditto
``torch.is_autocast_enabled()``        the same of ``"cpu"``                  without a device it asks about the GPU
=====================================  =====================================  =======================================

Source that is not TransformerEngine's spells devices in more ways, which ``normalize_devices`` reduces to these.
"""

from __future__ import annotations

import ast
import re

CUDA_MODULE = "parity.cpu.cuda"
# What rewritten source finds ``parity.cpu.cuda`` under; whoever executes it sets this name before.
CUDA_NAME = "__parity_cuda__"

_DEVICE_WITH_INDEX = re.compile(r"cuda:\d*")


def cuda_means_cpu(tree: ast.AST) -> ast.Module:
    """The tree, changed in place as this module's docstring says."""
    return _CudaMeansCpu().visit(tree)


def normalize_devices(tree: ast.AST) -> ast.Module:
    """The tree, changed in place: ``"cuda:0"``, ``f"cuda:{rank}"`` and ``x.cuda(device)`` lose their index."""
    return _WithoutIndices().visit(tree)


class _CudaMeansCpu(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="cuda"):
                return ast.copy_location(ast.Name(CUDA_NAME, node.ctx), node)
            case ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="version"), attr="cuda"):
                node.value, node.attr = ast.copy_location(ast.Name(CUDA_NAME, ast.Load()), node), "CUDA_VERSION"
                return node
        self.generic_visit(node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr="device"), args=[ast.Constant("cpu"), _]):
                node.args = node.args[:1]
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr="is_autocast_enabled"), args=[]):
                node.args = [ast.copy_location(ast.Constant("cpu"), node)]
            case ast.Call(func=ast.Attribute(attr="cuda") as method, args=[]):
                method.attr = "cpu"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = CUDA_MODULE
        return node


class _WithoutIndices(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and _DEVICE_WITH_INDEX.fullmatch(node.value):
            return ast.copy_location(ast.Constant("cuda"), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        match node.values:
            case [ast.Constant("cuda:"), ast.FormattedValue()]:
                return ast.copy_location(ast.Constant("cuda"), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(attr="cuda", value=owner)) if not _is_torch(owner):
                node.args, node.keywords = [], []
        return node


def _is_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"
