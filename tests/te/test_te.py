"""TE on the CPU loads, and leaks nothing into the process."""

import json
import operator
import subprocess
import sys
import threading
from types import ModuleType

import pytest
import torch

from parity import te
from parity.te import BackendUnavailable
from parity.te.devices import refusing_meta_tensors

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
    """Import a TransformerEngine without its compiled part, which it notices when it is imported."""
    run = run_python(
        "import torch; torch.cuda.is_available = lambda: True; torch.cuda.current_device = lambda: 0\n"
        "from parity import te; from parity.machine import devices; devices.is_installed = lambda: True\n"
        "try: te.kernels()\n"
        "except te.BackendUnavailable as error: print(error)"
    )
    assert "kernels are installed, but do not load: RuntimeError: Found empty `transformer-engine`" in run.stdout
    assert "or choose the backend cpu" in run.stdout


def test_whether_te_s_kernels_are_installed_is_found_out_while_its_imports_are_served():
    """Look for TE itself, because the kernels' wheel is installed inside TE's folder."""
    run = run_python(
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from parity import te; te.serve_imports(); print(te.why_no_gpu())\n"
        "import transformer_engine.pytorch; print(transformer_engine.pytorch.Linear.__name__)"
    )
    assert "compiled extension is not installed" in run.stdout
    assert "Linear" in run.stdout


def test_compiled_kernels_get_no_tensor_without_memory(monkeypatch):
    kernels = ModuleType("transformer_engine_torch")
    kernels.quantize = operator.neg  # a compiled function
    kernels.Python = max_of = lambda x: x
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", kernels)
    with refusing_meta_tensors():
        assert kernels.quantize(torch.ones(2)).tolist() == [-1, -1]
        assert kernels.Python is max_of
        with pytest.raises(TypeError, match="compiled quantize needs memory"):
            kernels.quantize(torch.ones(2, device="meta"))
    assert kernels.quantize is operator.neg


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


USED = """
import json, os, sys, types, warnings
environment = dict(os.environ)


def said():
    try:
        te.kernels()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    # TE 2.14 uses it, of which torch itself warns.
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
    from parity import te
    from te_on_cpu import extension
    sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
    to_one_that_was_there = said()
    del sys.modules["transformer_engine"]
    kept = extension.enums.DType
    del extension.enums.DType
    without_a_part = said()
    left = [name for name in sys.modules if name.startswith("transformer_engine")]
    left += [finder for finder in map(repr, sys.meta_path) if "CpuFinder" in finder]
    extension.enums.DType = kept
    te.serve_imports()
    te.serve_imports()
    import transformer_engine.pytorch
found = dict(
    to_one_that_was_there=to_one_that_was_there,
    without_a_part=without_a_part,
    left=left,
    warnings=[str(one.message) for one in told],
    is_served=te.kernels().te is transformer_engine.pytorch,
    leaves_environment=dict(os.environ) == environment,
)

from importlib.util import cache_from_source
from pathlib import Path
bytecode = Path(cache_from_source(transformer_engine.pytorch.module.linear.__file__))
found["leaves_bytecode"] = not bytecode.exists() or b"__parity_cuda__" not in bytecode.read_bytes()

import parity, torch
with te.on_cpu():
    import transformer_engine.pytorch as own
model = torch.nn.Sequential(own.LayerNormLinear(32, 64), own.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = torch.randn(64, 32), torch.randn(64, 1)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found["losses"] = losses

def factory(te, batch, width):
    inputs, weights = lambda rng, batch, width: rng.normal(batch, width), {"weight": "weight"}
    return parity.Pair(torch.nn.RMSNorm(width, eps=1e-2), te.RMSNorm(width, eps=0.5), inputs, weights)

(result,) = parity.compare(parity.Case("norm", factory, sizes=(dict(batch=2, width=16),)), ["fp32"])
found.update(status=result.status, findings=len(result.findings), imports_triton="triton" in sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def used():
    """Return what a process observed that failed to import TE, then imported it, trained and compared a wrong port."""
    run = run_python(USED)
    assert run.returncode == 0, run.stderr
    return {"stderr": run.stderr, **json.loads(run.stdout)}


def test_importing_te_warns_of_nothing(used):
    assert used["warnings"] == []
    assert "arn" not in used["stderr"]


def test_importing_te_leaves_the_environment_as_it_was(used):
    assert used["leaves_environment"]


def test_importing_te_writes_no_bytecode_that_a_real_te_would_read(used):
    assert used["leaves_bytecode"]


def test_imports_are_served_where_te_could_not_be_imported_before(used):
    assert used["is_served"]


def test_on_cpu_te_is_imported_as_ever_and_trains(used):
    assert used["losses"][-1] < used["losses"][0]


def test_a_failed_comparison_imports_no_triton_which_a_process_takes_long_to_leave(used):
    assert used["status"] == "failed"
    assert used["findings"]
    assert not used["imports_triton"]


def test_a_te_that_was_imported_before_is_not_taken_over(used):
    assert used["to_one_that_was_there"].startswith("BackendUnavailable: ")
    assert "already imported transformer_engine" in used["to_one_that_was_there"]


def test_a_failed_import_of_te_leaves_nothing_behind(used):
    assert used["without_a_part"].startswith("AttributeError: ")
    assert used["left"] == []


def test_a_missing_kernel_names_itself_the_version_and_who_asked():
    te.kernels()
    import transformer_engine_torch as tex

    asked = rf"{__name__} of TransformerEngine {te.version()} called .*newton_schulz"
    with pytest.raises(NotImplementedError, match=asked):
        tex.newton_schulz()
