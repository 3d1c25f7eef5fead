"""Checkpoints of ``torch.distributed.checkpoint``: they are read and written one tensor at a time."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

from parity.cli import app
from parity.user_error import UserError
from parity.weights.conversion import checkpoint
from parity.weights.conversion.plan import Made, Plan, Step

PAIR = """
    import parity
    from torch import nn

    @parity.pair("stacked", sizes=[dict(hidden=16)])
    def stacked(te, hidden):
        return parity.Pair(
            nn.ModuleDict({"q": nn.Linear(hidden, hidden), "k": nn.Linear(hidden, hidden)}),
            te.Linear(hidden, 2 * hidden),
            lambda rng: rng.normal(2, hidden),
            {parity.stack("q.weight", "k.weight"): "weight", parity.stack("q.bias", "k.bias"): "bias"},
        )
"""


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "pairs.py").write_text(PAIR.replace("\n    ", "\n"))
    return tmp_path / "pairs.py"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def save(content, folder: Path) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def weights() -> dict[str, torch.Tensor]:
    shapes = {"q.weight": (16, 16), "k.weight": (16, 16), "q.bias": (16,), "k.bias": (16,)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def convert(*arguments: object):
    return CliRunner().invoke(app, ["convert", *map(str, arguments), "--backend", "cpu", "-q"])


def test_there_and_back_restores_every_bit(pair, tmp_path):
    given = weights()
    training = {"model": given, "optimizer": {"state": {"q.weight": torch.ones(3)}}, "step": 7}
    source, te, back = save(training, tmp_path / "source"), tmp_path / "te", tmp_path / "back"
    ended = convert(pair, source, te, "--within", "model", "--format", "dcp")
    assert ended.exit_code == 0, ended.exception
    assert sorted(path.suffix or path.name for path in te.iterdir()) == [".distcp", ".json", ".metadata"]
    ended = convert(pair, te, back, "--to", "reference", "--format", "dcp")
    assert ended.exit_code == 0, ended.exception
    found = {name: torch.empty_like(x) for name, x in given.items()}
    dcp.load(found, checkpoint_id=back, no_dist=True)
    assert all(torch.equal(found[name], x) for name, x in given.items())


def save_a_half(rank: int, folder: Path, given: dict[str, torch.Tensor]) -> None:
    """Save a checkpoint of which each of two ranks has half of every tensor's rows."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in given.items()}, checkpoint_id=folder)
    torch.distributed.destroy_process_group()


def test_what_two_ranks_saved_is_put_together(tmp_path):
    given = weights()
    torch.multiprocessing.spawn(save_a_half, (tmp_path / "source", given), nprocs=2)
    assert len(list((tmp_path / "source").glob("*.distcp"))) == 2
    read = checkpoint.read(tmp_path / "source")
    assert read.keys() == given.keys()
    assert all(torch.equal(read[name].detach(), x) for name, x in given.items())


def test_a_tensor_is_read_when_it_is_computed_with(tmp_path):
    given = weights()
    read = checkpoint.read(save(given, tmp_path / "source"))
    for file in (tmp_path / "source").glob("*.distcp"):
        file.rename(file.with_suffix(".aside"))
    assert {name: (x.shape, x.dtype) for name, x in read.items()} == {
        name: (x.shape, x.dtype) for name, x in given.items()
    }
    for file in (tmp_path / "source").glob("*.aside"):
        file.rename(file.with_suffix(".distcp"))
    assert torch.equal(read["q.weight"].float(), given["q.weight"].float())


def test_each_step_is_computed_once_while_it_is_written(tmp_path):
    computed: list[str] = []

    def step(key: str) -> Step:
        return Step((Made(key, (2,), torch.float32),), lambda: computed.append(key) or {key: torch.ones(2)})

    both = Step(
        (Made("c", (2,), torch.float32), Made("d", (2,), torch.float32)),
        lambda: computed.append("c and d") or {"c": torch.ones(2), "d": torch.ones(2)},
    )
    checkpoint.write_folder(tmp_path / "out", Plan(("a", "b", "c", "d"), [step("a"), step("b"), both]))
    assert sorted(computed) == ["a", "b", "c and d"]


def test_nothing_is_left_if_a_step_raises(tmp_path):
    def raises() -> dict[str, torch.Tensor]:
        raise UserError("in the middle")

    plan = Plan(("a",), [Step((Made("a", (2,), torch.float32),), raises)])
    with pytest.raises(UserError, match="in the middle"):
        checkpoint.write_folder(tmp_path / "out", plan)
    assert not list(tmp_path.iterdir())


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / ".metadata").write_bytes(b"no pickle"), "metadata cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(_Runs())), "it names posix.mkdir"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])), "metadata cannot be read"),
        (lambda folder: [file.write_bytes(file.read_bytes()[:64]) for file in folder.glob("*.distcp")], "is damaged"),
        (lambda folder: [file.unlink() for file in folder.glob("*.distcp")], "is damaged"),
    ],
    ids=["no pickle", "code", "other content", "cut short", "no data"],
)
def test_a_damaged_folder_is_told(pair, tmp_path, monkeypatch, spoil, told):
    monkeypatch.chdir(tmp_path)
    spoil(save(weights(), tmp_path / "source"))
    ended = convert(pair, tmp_path / "source", tmp_path / "te.safetensors")
    assert isinstance(ended.exception, UserError)
    assert told in str(ended.exception)
    assert not (tmp_path / "was-here").exists()
    assert not (tmp_path / "te.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "more than tensors, such as 'step'; name the model's entry with --within"),
        (["--within", "modul"], "has no tensors in an entry 'modul'; it has model, step"),
    ],
)
def test_the_entry_of_the_model_must_be_named(pair, tmp_path, arguments, told):
    source = save({"model": weights(), "step": 7}, tmp_path / "source")
    ended = convert(pair, source, tmp_path / "te.safetensors", *arguments)
    assert told in str(ended.exception)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["te.safetensors", "--format", "dcp"], "DST is a folder"),
        (["te", "--format", "dcp", "--shard-size", "5GB"], "--shard-size is for safetensors"),
        (["te", "--format", "zip"], "--format is 'zip'"),
    ],
)
def test_formats_that_do_not_fit_are_refused(pair, tmp_path, arguments, told):
    destination, *options = arguments
    source = save(weights(), tmp_path / "source")
    assert told in str(convert(pair, source, tmp_path / destination, *options).exception)
