"""Rewrite the syntax tree of Python source so that ``cuda`` in it means the CPU."""

from __future__ import annotations

import ast
import re
from types import ModuleType

from te_on_cpu import cuda, distributed

# =====================================  =====================================  =======================================
# in the source                          becomes                                because
# =====================================  =====================================  =======================================
# ``"cuda"``                             ``"cpu"``                              devices in arguments and comparisons
# ``torch.version.cuda``                 the emulated GPU's CUDA version        what is available depends on it
# ``torch.cuda``                         ``te_on_cpu.cuda``                    streams, properties, generators
# ``torch.distributed``                  ``te_on_cpu.distributed``             ranks communicate through gloo
# ``torch.device("cuda", index)``        ``torch.device("cpu")``                CPU tensors carry no index
# ``tensor.is_cuda``                     ``tensor.is_cpu``                      "is this where the kernels run?"
# ``tensor.cuda()``                      ``tensor.cpu()``                       stays where the kernels run
# ``torch.is_autocast_enabled()``        the same with ``"cpu"``                without a device it asks about the GPU
# ``torch.empty(..., pin_memory=x)``     ``pinned(torch.empty(...), x)``        memory is pinned for a GPU
# ``group._comm_ptr()``                  any number                             gloo has no communicator of NCCL
# =====================================  =====================================  =======================================
#
# Sources other than TransformerEngine's use more spellings, which ``normalize_devices`` reduces to these:
#
# =====================================  =====================================  =======================================
# ``"cuda:0"``, ``f"cuda:{rank}"``       ``"cuda"``                             there is one device
# ``x.cuda(device)``                     ``x.cuda()``
# ``x.to(place)``, ``f(device=place)``,  the CPU if the value is a CUDA         a rank is a device's index, as in
# ``torch.device(place, ...)``           device or an index                     ``model.to(rank)``
# ``DDP(model, device_ids=[rank])``      ``DDP(model)``                         the ids are those of GPUs
# ``x.pin_memory()``                     ``x``                                  memory is pinned for a GPU
# ``x.record_stream(stream)``            nothing                                work is done when a call returns
# ``"torch.cuda.FloatTensor"``           ``"torch.FloatTensor"``
# =====================================  =====================================  =======================================


# Stand-ins for modules of torch, and their names in rewritten source. These names (``STAND_INS``) must be set before
# the source is executed.
_MODULES = {"cuda": "__parity_cuda__", "distributed": "__parity_distributed__"}
STAND_INS: dict[str, ModuleType] = {"__parity_cuda__": cuda, "__parity_distributed__": distributed}

_STAND_IN_OF = {
    "torch.cuda": "te_on_cpu.cuda",
    "torch.cuda.random": "te_on_cpu.cuda",
    "torch.distributed": "te_on_cpu.distributed",
    "torch.distributed.distributed_c10d": "te_on_cpu.distributed",
}

_DEVICE_WITH_INDEX = re.compile(r"cuda:\d+")
_TENSOR_TYPE = re.compile(r"torch\.cuda\.(\w+Tensor)")


def cuda_means_cpu(tree: ast.AST) -> ast.Module:
    """Change the tree in place as the first table above says, and return it."""
    return _CudaMeansCpu().visit(tree)


def normalize_devices(tree: ast.AST) -> ast.Module:
    """Change the tree in place as the second table above says, and return it."""
    return _AnyDevice().visit(tree)


class _CudaMeansCpu(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name) if name in _MODULES:
                return ast.copy_location(ast.Name(_MODULES[name], node.ctx), node)
            case ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="version"), attr="cuda"):
                node.value, node.attr = ast.copy_location(ast.Name(_MODULES["cuda"], ast.Load()), node), "CUDA_VERSION"
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
            case ast.Call(func=ast.Attribute(attr="_comm_ptr", value=owner), args=[]):
                return _ask_cuda("comm_ptr", node, owner)
        asked = (
            [each.value for each in node.keywords if each.arg == "pin_memory"] if _is_torch(_root(node.func)) else []
        )
        if asked:
            node.keywords = [each for each in node.keywords if each.arg != "pin_memory"]
            return _ask_cuda("pinned", node, node, *asked)
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if alias.asname is not None:  # without ``as``, it binds the name ``torch``
                alias.name = _STAND_IN_OF.get(alias.name, alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.level == 0:
            node.module = _STAND_IN_OF.get(node.module or "", node.module)
        if node.level == 0 and node.module == "torch":
            ours = [alias for alias in node.names if alias.name in _MODULES]
            node.names = [alias for alias in node.names if alias not in ours]
            imports = [node] if node.names else []
            imports += [ast.copy_location(ast.ImportFrom("te_on_cpu", ours, 0), node)] if ours else []
            return list(imports)
        return node


class _AnyDevice(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        if _DEVICE_WITH_INDEX.fullmatch(node.value):
            return ast.copy_location(ast.Constant("cuda"), node)
        if found := _TENSOR_TYPE.fullmatch(node.value):
            return ast.copy_location(ast.Constant(f"torch.{found[1]}"), node)
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
            case ast.Call(func=ast.Attribute(attr="to"), args=[place, *_]):
                node.args[0] = _placed(place)
            case ast.Call(func=ast.Attribute(attr="device", value=owner), args=[place, *_]) if _is_torch(owner):
                node.args = [_placed(place)]
            case ast.Call(func=ast.Attribute(attr="pin_memory", value=owner), args=[], keywords=[]):
                return _ask_cuda("pinned", node, owner)
            case ast.Call(func=ast.Attribute(attr="record_stream", value=owner), args=[stream], keywords=[]):
                return _ask_cuda("record_stream", node, owner, stream)
        is_ddp = _last(node.func) in ("DistributedDataParallel", "DDP")
        dropped = {"device_ids", "output_device"} if is_ddp else set()
        node.keywords = [each for each in node.keywords if each.arg not in dropped]
        for each in node.keywords:
            if each.arg == "device":
                each.value = _placed(each.value)
        return node


def _placed(place: ast.expr) -> ast.expr:
    """Return an expression that replaces a CUDA device by the CPU when it is evaluated, if its value is a device."""
    return (
        place
        if isinstance(place, ast.Constant) and place.value in ("cuda", "cpu", None)
        else _ask_cuda("placed", place, place)
    )


def _ask_cuda(function: str, where: ast.expr, *arguments: ast.expr) -> ast.expr:
    called = ast.Attribute(ast.Name(_MODULES["cuda"], ast.Load()), function, ast.Load())
    return ast.fix_missing_locations(ast.copy_location(ast.Call(called, list(arguments), []), where))


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"
