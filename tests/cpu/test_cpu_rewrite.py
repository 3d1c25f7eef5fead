"""What source becomes in which ``cuda`` means the CPU."""

import ast

import pytest

from parity.cpu.loading.loader import cuda_means_cpu, normalize_devices


def rewritten(source):
    return ast.unparse(cuda_means_cpu(ast.parse(source)))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("f(device='cuda')", "f(device='cpu')"),
        ("x.device.type == 'cuda'", "x.device.type == 'cpu'"),
        ("torch.cuda.current_stream()", "__parity_cuda__.current_stream()"),
        ("torch.version.cuda", "__parity_cuda__.CUDA_VERSION"),
        ("torch.device('cuda', torch.cuda.current_device())", "torch.device('cpu')"),
        ("x.is_cuda", "x.is_cpu"),
        ("x.cuda()", "x.cpu()"),
        ("from torch.cuda import _lazy_call", "from parity.cpu.cuda import _lazy_call"),
    ],
)
def test_cuda_is_read_as_the_cpu(written, read):
    assert rewritten(written) == read


@pytest.mark.parametrize(
    "source", ["x = 'cuda graphs'", "cuda = 1", "module.cuda", "x.cuda(device)", "torch.cudagraph", "torch.compile(f)"]
)
def test_other_words_stay(source):
    assert rewritten(source) == source


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x.to('cuda:0')", "x.to('cuda')"),
        ("x.to(f'cuda:{rank}')", "x.to('cuda')"),
        ("x.cuda(rank, non_blocking=True)", "x.cuda()"),
        ("torch.device('cuda:1')", "torch.device('cuda')"),
    ],
)
def test_devices_lose_their_index(written, read):
    assert ast.unparse(normalize_devices(ast.parse(written))) == read


@pytest.mark.parametrize("source", ["x = 'cuda: out of memory'", "print(f'cuda:{rank} is ready')", "torch.cuda(1)"])
def test_text_that_is_no_device_stays(source):
    assert ast.unparse(normalize_devices(ast.parse(source))) == source
