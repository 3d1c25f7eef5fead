"""TE on the CPU: it loads, and nothing of it leaks."""

import subprocess
import sys
import threading

import pytest
import torch

from parity import te
from parity.te import BackendUnavailable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes machines without a GPU")


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def linear():
    return te.kernels().te.Linear(32, 16)


def assert_nothing_leaked():
    assert not torch.cuda.is_available()
    assert not torch.zeros(1).is_cuda
    assert type(torch.Tensor.is_cuda).__name__ == "getset_descriptor"
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|cuda|NVIDIA driver"):
        torch.zeros(1, device="cuda")


def test_without_a_gpu_the_backend_is_the_cpu():
    kernels = te.kernels()
    assert kernels.backend == "cpu"
    assert kernels.device == torch.device("cpu")


def test_asking_for_a_gpu_that_is_not_there_says_what_is_missing():
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        te.kernels("gpu")


def test_compiled_kernels_that_do_not_load_are_told_in_te_s_words_with_what_to_do():
    """Here TransformerEngine has no compiled part, which it finds out when it is imported."""
    run = run_python(
        "import torch; torch.cuda.is_available = lambda: True; torch.cuda.current_device = lambda: 0\n"
        "from parity import te; from parity.machine import devices; devices.is_installed = lambda: True\n"
        "try: te.kernels()\n"
        "except te.BackendUnavailable as error: print(error)"
    )
    assert "kernels are installed, but do not load: RuntimeError: Found empty `transformer-engine`" in run.stdout
    assert "or choose the backend cpu" in run.stdout


def test_cuda_is_as_absent_after_a_forward_and_backward_pass_as_before(linear):
    linear(torch.randn(8, 32)).sum().backward()
    assert_nothing_leaked()


def test_cuda_is_as_absent_after_an_exception_inside_te(linear):
    with pytest.raises(Exception):  # noqa: B017, PT011 - any: TE's choice
        linear(torch.randn(8, 31))
    assert_nothing_leaked()


def test_te_computes_in_threads_while_other_threads_see_no_cuda(linear):
    seen, done = set(), threading.Event()

    def watch():
        while not done.is_set():
            seen.add(torch.cuda.is_available())

    def compute():
        for _ in range(5):
            linear(torch.randn(8, 32)).sum().backward()

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=compute) for _ in range(2)]
    watcher.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    watcher.join()
    assert seen == {False}
    assert_nothing_leaked()


def test_importing_te_warns_of_nothing():
    ran = run_python(
        "import warnings; warnings.simplefilter('error')\n"
        # TE 2.14 uses it, of which torch itself warns.
        "warnings.filterwarnings('ignore', message='.*torch.jit.script', category=DeprecationWarning)\n"
        "from parity import te; te.kernels()"
    )
    assert ran.returncode == 0, ran.stderr
    assert "arn" not in ran.stderr


def test_importing_te_leaves_the_environment_as_it_was():
    ran = run_python(
        "import os; before = dict(os.environ); from parity import te; te.kernels(); assert os.environ == before"
    )
    assert ran.returncode == 0, ran.stderr


def test_a_failed_comparison_imports_no_triton_which_a_process_takes_long_to_leave():
    ran = run_python(
        "import sys, torch, parity\n"
        "def factory(te, batch, width):\n"
        "    inputs, weights = lambda rng, batch, width: rng.normal(batch, width), {'weight': 'weight'}\n"
        "    return parity.Pair(torch.nn.RMSNorm(width, eps=1e-2), te.RMSNorm(width, eps=0.5), inputs, weights)\n"
        "case = parity.Case('norm', factory, sizes=(dict(batch=2, width=16),))\n"
        "(result,) = parity.compare(case, ['fp32'])\n"
        "assert result.status == 'failed' and result.findings, result\n"
        "assert 'triton' not in sys.modules"
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_te_writes_no_bytecode_that_a_real_te_would_read():
    ran = run_python(
        "import sys; from parity import te; te.kernels()\n"
        "import transformer_engine.pytorch.module.linear as m\n"
        "from pathlib import Path; from importlib.util import cache_from_source\n"
        "import marshal\n"
        "path = Path(cache_from_source(m.__file__))\n"
        "assert not path.exists() or b'__parity_cuda__' not in path.read_bytes()"
    )
    assert ran.returncode == 0, ran.stderr


def test_a_te_that_was_imported_before_is_not_taken_over():
    ran = run_python(
        "import sys, types; sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')\n"
        "from parity import te\n"
        "try: te.kernels()\n"
        "except te.BackendUnavailable as error: print(error)"
    )
    assert "already imported transformer_engine" in ran.stdout


def test_a_failed_import_of_te_leaves_nothing_behind():
    ran = run_python(
        "import sys; from parity import te\n"
        "import parity.cpu.extension as extension\n"
        "del extension.enums.DType\n"
        "try: te.kernels()\n"
        "except Exception: pass\n"
        "assert not [name for name in sys.modules if name.startswith('transformer_engine')]\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__name__ == 'CpuFinder']"
    )
    assert ran.returncode == 0, ran.stderr


def test_on_cpu_te_is_imported_as_ever_and_trains():
    ran = run_python(
        "import torch, parity\n"
        "with parity.te.on_cpu():\n"
        "    import transformer_engine.pytorch as te\n"
        "model = torch.nn.Sequential(te.LayerNormLinear(32, 64), te.Linear(64, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "x, y = torch.randn(64, 32), torch.randn(64, 1)\n"
        "losses = []\n"
        "for _ in range(5):\n"
        "    optimizer.zero_grad()\n"
        "    loss = (model(x) - y).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    losses.append(loss.item())\n"
        "assert losses[-1] < losses[0], losses"
    )
    assert ran.returncode == 0, ran.stderr


def test_imports_are_served_where_te_could_not_be_imported_before():
    ran = run_python(
        "from parity import te; te.serve_imports(); te.serve_imports()\n"
        "import transformer_engine.pytorch\n"
        "assert te.kernels().te is transformer_engine.pytorch"
    )
    assert ran.returncode == 0, ran.stderr


def test_a_missing_kernel_names_itself_the_version_and_who_asked():
    te.kernels()
    import transformer_engine_torch as tex

    with pytest.raises(NotImplementedError, match=rf"ep_dispatch.*{__name__}.*TransformerEngine {te.version()}"):
        tex.ep_dispatch()
