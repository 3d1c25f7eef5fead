"""A layer under TE's debug features is judged by what it then rounds; features that only look change nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import forked
import pytest
import torch
from torch import nn

import parity
from parity.report import record
from parity.result import Result

debug_api = pytest.importorskip("nvdlfw_inspect.api", reason="TE's debug features need nvdlfw_inspect")
te = parity.te.kernels("cpu").te

FEATURES = str(Path(te.__file__).parents[1] / "debug" / "features")
FAKE = {"quant_format": "FP8E5M2", "gemms": ["fprop", "dgrad"], "tensors": ["activation", "weight", "gradient"]}
FAKE_PRODUCTS = {**FAKE, "gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["output", "dgrad", "wgrad"]}
LOOKED_AT = {"tensors": ["activation", "weight", "gradient"], "freq": 1}


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


class Port(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.up, self.down = te.Linear(64, 128, name="model.fc1"), te.Linear(128, 64, name="model.fc2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


def start(folder: Path, layer: str, feature: str, **settings: Any) -> None:
    """Start nvdlfw_inspect with one feature of one layer; a pair's function may be called more than once."""
    if debug_api.DEBUG_MANAGER is None:
        configured = {feature: {"enabled": True, **settings}}
        config = {"one": {"enabled": True, "layers": {"layer_types": [layer]}, "transformer_engine": configured}}
        debug_api.initialize(config_file=config, feature_dirs=[FEATURES], log_dir=str(folder))


def compared(
    precision: str, begin: Callable[[], None], scale: float = 1.0, pair: parity.Pair | None = None, **options: Any
) -> Result:
    def build(te: Any) -> parity.Pair:
        begin()
        return pair or parity.Pair(
            reference=Reference(),
            candidate=Port(scale),
            inputs=lambda rng: rng.normal(32, 64),
            weights={f"{layer}.{name}": f"{layer}.{name}" for layer in ("up", "down") for name in ("weight", "bias")},
        )

    (result,) = parity.compare(parity.pair("under_features")(build), precisions=[precision], **options)
    return result


CHANGES = [
    ("fp8_current", "DisableQuantizationLayer", {}),
    ("fp8_current", "DisableFP8Layer", {}),
    ("fp8_delayed", "DisableQuantizationGEMM", {"gemms": ["fprop"]}),
    ("fp8_current", "DisableQuantizationGEMM", {"gemms": ["dgrad"]}),
    ("fp8_block", "DisableFP8GEMM", {"gemms": ["wgrad"]}),
    ("fp8_current", "FakeQuant", FAKE),
    ("bf16", "FakeQuant", FAKE),
    ("bf16", "FakeQuant", FAKE_PRODUCTS),
    ("fp8_delayed", "PerTensorScaling", {"gemms": ["fprop", "dgrad"], "tensors": ["activation", "gradient"]}),
]


@pytest.mark.parametrize(("precision", "feature", "settings"), CHANGES)
def test_a_layer_is_judged_by_the_formats_that_a_feature_gives_it(
    precision: str, feature: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    def begin() -> None:
        start(tmp_path, "fc1", feature, **settings)

    right = compared(precision, begin)
    assert right.passed, right.reason
    assert any("TE's debug features give layers other formats" in note and "up.weight" in note for note in right.notes)
    assert not any("PAR308" in note for note in right.notes)
    for tensor in right.tensors:
        if tensor.name.endswith("bias"):  # of a few numbers
            continue
        assert tensor.errors.relative_l2 == pytest.approx(tensor.expected.relative_l2, rel=0.15), tensor.name
    assert compared(precision, begin, scale=1.05, diagnose=False).status == "failed"


def test_a_feature_that_is_expected_and_missing_fails(tmp_path: Path) -> None:
    """The check that a layer's own formats are expected, and not just wider limits: FP8 where BF16 is declared."""
    usual = compared("fp8_current", lambda: None)
    spared = compared("fp8_current", lambda: start(tmp_path, "fc", "DisableQuantizationLayer"))
    assert spared.passed
    expected = {one.key: one.expected.relative_l2 for one in spared.tensors}
    assert all(one.errors.relative_l2 > 5 * expected[one.key] for one in usual.tensors if "bias" not in one.name)


@pytest.mark.parametrize(
    ("feature", "settings"),
    [
        ("LogTensorStats", {"stats": ["max", "l1_norm"], **LOOKED_AT}),
        ("LogFp8TensorStats", {"stats": ["underflows%", "mse"], **LOOKED_AT}),
        ("DumpTensors", {"high_precision_tensor": True, "quantized_tensor": True, **LOOKED_AT}),
    ],
)
def test_a_feature_that_looks_changes_no_number(feature: str, settings: dict[str, Any], tmp_path: Path) -> None:
    looked_at = compared("fp8_current", lambda: start(tmp_path, "fc", feature, **settings), stages=True)
    usual = compared("fp8_current", lambda: None, stages=True)
    assert looked_at.passed
    assert [one.digest for one in looked_at.tensors] == [one.digest for one in usual.tensors]
    assert repr(looked_at.stages) == repr(usual.stages)
    assert looked_at.formats == usual.formats
    assert not any("debug features" in note for note in looked_at.notes)
    assert any(tmp_path.rglob("*"))


@pytest.mark.parametrize(("feature", "settings"), [("DisableQuantizationLayer", {}), ("FakeQuant", FAKE)])
def test_a_training_under_features_passes_with_its_stages(
    feature: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """With delayed scaling, a quantizer that a feature passes by records no amax, which is right then."""
    trained = compared("fp8_delayed", lambda: start(tmp_path, "fc1", feature, **settings), steps=3)
    assert trained.passed, trained.findings
    staged = compared("fp8_delayed", lambda: start(tmp_path, "fc1", feature, **settings), stages=True)
    assert staged.passed, staged.reason


def test_experts_and_both_layers_of_an_mlp_have_names_of_their_own(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self, of: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.experts = of()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.experts, nn.ModuleList):
                return torch.cat([one(part) for one, part in zip(self.experts, x.split(32), strict=True)])
            return self.experts(x, [32, 32])

    def experts() -> None:
        start(tmp_path, "gemm_1", "FakeQuant", **FAKE)

    def mlp() -> None:
        start(tmp_path, "fc2", "DisableQuantizationLayer")

    for begin, build, held in (
        (
            experts,
            lambda: parity.Pair(
                reference=Experts(lambda: nn.ModuleList(nn.Linear(64, 96, bias=False) for _ in range(2))),
                candidate=Experts(lambda: te.GroupedLinear(2, 64, 96, bias=False, name="moe")),
                weights={f"experts.{i}.weight": f"experts.weight{i}" for i in range(2)},
                inputs=lambda rng: rng.normal(64, 64),
            ),
            "experts.weight1 (",
        ),
        (
            mlp,
            lambda: parity.Pair(
                reference=nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU("tanh"), nn.Linear(128, 64)),
                candidate=te.LayerNormMLP(64, 128, name="mlp"),
                weights={
                    **{f"0.{one}": f"layer_norm_{one}" for one in ("weight", "bias")},
                    **{f"1.{one}": f"fc1_{one}" for one in ("weight", "bias")},
                    **{f"3.{one}": f"fc2_{one}" for one in ("weight", "bias")},
                },
                inputs=lambda rng: rng.normal(32, 64),
            ),
            "fc2_weight (",
        ),
    ):

        def pair(te: Any, begin: Any = begin, build: Any = build) -> parity.Pair:
            begin()
            return build()

        (result,) = parity.compare(parity.pair("of_several_layers")(pair), precisions=["fp8_current"])
        assert result.passed, result.reason
        assert any(f"judged: {held}" in note for note in result.notes), result.notes


FEATURE = """
    from nvdlfw_inspect.registry import Registry, api_method
    from transformer_engine.debug.features.api import TEConfigAPIMapper

    @Registry.register_feature(namespace="transformer_engine")
    class Halved(TEConfigAPIMapper):
        @api_method
        def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
            return True, iteration + 1

        @api_method
        def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, iteration, default_quantizer, **rest):
            return tensor / 2
"""


def test_a_feature_of_the_users_is_named_as_one_without_a_model(tmp_path: Path) -> None:
    features = tmp_path / "features"
    features.mkdir()
    (features / "halved.py").write_text(dedent(FEATURE))

    def begin() -> None:
        if debug_api.DEBUG_MANAGER is None:
            halved = {"Halved": {"enabled": True, "gemms": ["fprop"], "tensors": ["output"]}}
            config = {"one": {"enabled": True, "layers": {"layer_types": ["fc1"]}, "transformer_engine": halved}}
            debug_api.initialize(config, feature_dirs=[FEATURES, str(features)], log_dir=str(tmp_path))

    result = compared("bf16", begin)
    assert result.status == "error"
    assert "model.fc1: Halved of the output in fprop" in result.reason


def test_features_of_one_pair_do_not_reach_another(tmp_path: Path) -> None:
    before = compared("fp8_current", lambda: None)
    under = compared("fp8_current", lambda: start(tmp_path, "fc", "DisableQuantizationLayer"))
    assert debug_api.DEBUG_MANAGER is None
    assert any("nvdlfw_inspect's configuration" in note for note in under.notes)
    after = compared("fp8_current", lambda: None)
    digests = [[one.digest for one in result.tensors] for result in (before, under, after)]
    assert digests[0] == digests[2] != digests[1]


def test_features_run_on_the_cpu_where_nvdlfw_inspect_is_imported_before_te(tmp_path: Path) -> None:
    script = f"""
        import nvdlfw_inspect.api as debug_api
        import torch
        from te_on_cpu.loading.loader import on_cpu
        with on_cpu():
            import transformer_engine.pytorch as te
        fake = {{"FakeQuant": {{"enabled": True, **{FAKE!r}}}}}
        config = {{"one": {{"enabled": True, "layers": {{"layer_types": ["fc1"]}}, "transformer_engine": fake}}}}
        debug_api.initialize(config, feature_dirs=[{FEATURES!r}], log_dir={str(tmp_path)!r})
        layer = te.Linear(32, 32, bias=False, name="fc1", params_dtype=torch.bfloat16)
        x = torch.randn(8, 32, dtype=torch.bfloat16)
        assert not torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, cwd=tmp_path)


FILE = """
    import parity
    from torch import nn
    {beside}

    @parity.pair({name!r}, precisions=["fp8_current"])
    def pair(te):
        return parity.Pair(
            reference=nn.Linear(64, 64, bias=False),
            candidate=te.Linear(64, 64, bias=False, name="fc1"),
            weights={{"weight": "weight"}},
            inputs=lambda rng: rng.normal(32, 64),
        )
"""
STARTS = """
import nvdlfw_inspect.api
spared = {{"DisableQuantizationLayer": {{"enabled": True}}}}
config = {{"one": {{"enabled": True, "layers": {{"layer_types": ["fc1"]}}, "transformer_engine": spared}}}}
nvdlfw_inspect.api.initialize(config, feature_dirs=[{features!r}])
"""


def test_a_file_that_starts_features_has_them_for_its_own_pairs(tmp_path: Path) -> None:
    starts = indent(STARTS.format(features=FEATURES), "    ")
    for name, beside in (("first", starts), ("between", ""), ("last", starts)):
        (tmp_path / f"{name}.py").write_text(dedent(FILE.format(name=name, beside=beside)))
    files = [f"{name}.py" for name in ("first", "between", "last")]
    ran = forked.run("-m", "pytest", "-p", "parity.plugin", *files, folder=tmp_path)
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr
    found = record.read(tmp_path / "reports/parity.jsonl").results
    features = {one.case: any("TE's debug features" in note for note in one.notes) for one in found}
    assert features == {"first": True, "between": False, "last": True}
