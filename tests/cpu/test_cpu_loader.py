"""What the loader makes of TE's source."""

import ast

import pytest

from parity.cpu.loader import _CudaMeansCpu


def rewritten(source):
    return ast.unparse(_CudaMeansCpu().visit(ast.parse(source)))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("f(device='cuda')", "f(device='cpu')"),
        ("x.device.type == 'cuda'", "x.device.type == 'cpu'"),
        ("torch.cuda.current_stream()", "__parity_cuda__.current_stream()"),
        ("torch.version.cuda", "__parity_cuda__.CUDA_VERSION"),
        ("torch.compile(f)", "__parity_compile__(f)"),
        ("torch.device('cuda', torch.cuda.current_device())", "torch.device('cpu')"),
        ("x.is_cuda", "x.is_cpu"),
        ("x.cuda()", "x.cpu()"),
        ("from torch.cuda import _lazy_call", "from parity.cpu.cuda import _lazy_call"),
    ],
)
def test_cuda_is_read_as_the_cpu(written, read):
    assert rewritten(written) == read


@pytest.mark.parametrize(
    "source", ["x = 'cuda graphs'", "cuda = 1", "module.cuda", "x.cuda(device)", "torch.cudagraph"]
)
def test_other_words_stay(source):
    assert rewritten(source) == source
