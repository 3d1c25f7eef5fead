"""Checkpoint files: those of other programs can be read, and each file is written completely or not at all."""

from __future__ import annotations

import errno
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from parity.case import registry
from parity.cli import app
from parity.conversion import checkpoint
from parity.conversion.plan import Made, Plan, Step
from parity.user_error import UserError

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b.weight": torch.randn(7).bfloat16(),
    "c.scalar": torch.tensor(2.5, dtype=torch.float64),
    "d.empty": torch.empty(0, dtype=torch.uint8),
    "e.mask": torch.tensor([True, False, True]),
    "f.transposed": torch.randn(4, 2).half().T,
    "g.ids": torch.arange(3),
}


def plan_of(tensors: dict[str, torch.Tensor]) -> Plan:
    def step(key: str, tensor: torch.Tensor) -> Step:
        return Step((Made(key, tuple(tensor.shape), tensor.dtype),), lambda: {key: tensor})

    return Plan(tuple(tensors), [step(*entry) for entry in tensors.items()])


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype
        assert torch.equal(found[key], tensor)


def test_the_library_reads_every_dtype_and_shape_that_is_written(tmp_path):
    size = checkpoint.write(tmp_path / "out.safetensors", plan_of(TENSORS))
    assert (tmp_path / "out.safetensors").stat().st_size == size
    assert_same(load_file(tmp_path / "out.safetensors"), TENSORS)
    assert_same(checkpoint.read(tmp_path / "out.safetensors"), TENSORS)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("in the middle"), "in the middle"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write .*out.safetensors: No space left on device"),
    ],
)
def test_what_is_there_stays_if_a_step_raises(tmp_path, error, told):
    file = tmp_path / "out.safetensors"
    file.write_bytes(b"before")
    plan = plan_of(TENSORS)

    def raises() -> dict[str, torch.Tensor]:
        raise error

    plan.steps.append(Step((), raises))
    with pytest.raises(UserError, match=told):
        checkpoint.write(file, plan)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def shards(folder: Path, save, suffix: str) -> Path:
    """Write two files and their index, as Hugging Face does."""
    names = [f"model-0000{i}-of-00002{suffix}" for i in (1, 2)]
    keys = sorted(TENSORS)
    places = {key: names[i % 2] for i, key in enumerate(keys)}
    for name in names:
        save({key: TENSORS[key].contiguous() for key in keys if places[key] == name}, folder / name)
    stem = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    index = folder / f"{stem}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def test_the_files_of_a_checkpoint_are_its_index_and_its_shards(tmp_path):
    index = shards(tmp_path, save_file, ".safetensors")
    names = [index.name, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for path in (index, tmp_path):
        assert sorted(file.name for file in checkpoint.files_of(path)) == sorted(names)
    assert checkpoint.files_of(tmp_path / names[1]) == [tmp_path / names[1]]


@pytest.mark.parametrize(("save", "suffix"), [(save_file, ".safetensors"), (torch.save, ".bin")], ids=["st", "torch"])
@pytest.mark.parametrize("by_folder", [False, True])
def test_shards_are_read_by_their_index_or_folder(tmp_path, save, suffix, by_folder):
    index = shards(tmp_path, save, suffix)
    assert_same(checkpoint.read(tmp_path if by_folder else index), TENSORS)


def saved(content, **arguments):
    return lambda folder: torch.save(content, folder / "model.pt", **arguments) or folder / "model.pt"


READ = {
    "torch.save": (saved(TENSORS), ""),
    "not an archive": (saved(TENSORS, _use_new_zipfile_serialization=False), ""),
    "an entry": (saved({"model": TENSORS, "step": 3}), "model"),
    "an entry of an entry": (saved({"state": {"model": TENSORS}}), "state.model"),
}


@pytest.mark.parametrize(("save", "within"), READ.values(), ids=READ)
def test_a_file_of_torch_save_is_read(tmp_path, save, within):
    assert_same(checkpoint.read(save(tmp_path), within), TENSORS)


class Other:
    pass


def cut(folder: Path) -> Path:
    file = folder / "model.safetensors"
    checkpoint.write(file, plan_of(TENSORS))
    file.write_bytes(file.read_bytes()[:-5])
    return file


def cut_archive(folder: Path) -> Path:
    file = saved(TENSORS)(folder)
    file.write_bytes(file.read_bytes()[:-50])
    return file


def text(name: str, content: str):
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


def without_a_shard(folder: Path) -> Path:
    index = shards(folder, save_file, ".safetensors")
    (folder / "model-00002-of-00002.safetensors").unlink()
    return index


def with_a_key_too_many(folder: Path) -> Path:
    index = shards(folder, save_file, ".safetensors")
    held = json.loads(index.read_text())
    held["weight_map"]["z"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(held))
    return index


def with_a_broken_program(folder: Path) -> Path:
    """Write a file whose pickle sets an item on an empty stack."""
    file = folder / "model.pt"
    with zipfile.ZipFile(saved(TENSORS)(folder)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, b"\x80\x02s." if name.endswith("data.pkl") else part)
    return file


UNREADABLE = {
    "nothing": (lambda folder: folder / "no.safetensors", "", "there is no file"),
    "an empty folder": (lambda folder: folder, "", "has none of model.safetensors.index.json"),
    "another kind": (text("model.gguf", ""), "", "should end in .safetensors"),
    "cut short": (cut, "", "cannot be read as safetensors"),
    "empty": (text("model.safetensors", ""), "", "cannot be read as safetensors"),
    "an archive that is cut": (cut_archive, "", "torch"),
    "a pickle that takes what it has not": (with_a_broken_program, "", "cannot be read by torch.load"),
    "code": (saved(Other()), "", "weights_only=True"),
    "no state dict": (saved([1, 2]), "", "holds a list, and no state dict"),
    "more than tensors": (saved({"model": TENSORS, "step": 3}), "", "name it with --within; it has model, step"),
    "no such entry": (saved({"model": TENSORS}), "module", "has no entry 'module'; it has model"),
    "no entries in safetensors": (lambda folder: cut(folder), "model", "has no nested entries such as 'model'"),
    "an index that is no JSON": (text("m.index.json", "{"), "", "not JSON"),
    "an index of another kind": (text("m.index.json", "{}"), "", "it lacks 'weight_map'"),
    "an index of other folders": (text("m.index.json", '{"weight_map": {"a": "../b"}}'), "", "is no file's name"),
    "a shard that is missing": (without_a_shard, "", "was it downloaded whole?"),
    "a key that is missing": (with_a_key_too_many, "", "holds 'z', but it does not"),
}


@pytest.mark.parametrize(("make", "within", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_is_told_in_a_sentence(tmp_path, make, within, message):
    with pytest.raises(UserError) as raised:
        checkpoint.read(make(tmp_path), within)
    assert message in str(raised.value)


def test_shards_and_their_index_are_what_the_library_and_this_one_read(tmp_path):
    folder = tmp_path / "made" / "te"
    sizes = checkpoint.write_shards(folder, plan_of(TENSORS), 24)
    names = [f"model-{i:05}-of-{len(sizes):05}.safetensors" for i in range(1, len(sizes) + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    assert [(folder / name).stat().st_size for name in names] == sizes
    assert {key for name in names for key in load_file(folder / name)} == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(x.numel() * x.dtype.itemsize for x in TENSORS.values())
    assert_same(checkpoint.read(folder), dict(sorted(TENSORS.items())))


@pytest.mark.parametrize(("largest", "files"), [(1, 6), (24, 4), (10**6, 1)])
def test_a_shard_is_no_larger_than_it_may_be_unless_one_tensor_is(tmp_path, largest, files):
    checkpoint.write_shards(tmp_path / "te", plan_of(TENSORS), largest)
    shards = [load_file(path) for path in sorted((tmp_path / "te").glob("*.safetensors"))]
    assert len(shards) == files
    sizes = [[x.numel() * x.dtype.itemsize for x in held.values() if x.numel()] for held in shards]
    assert all(len(each) == 1 or sum(each) <= largest for each in sizes)
    assert [key for held in shards for key in sorted(held)] == list(TENSORS), "in the module's order"


def test_a_folder_of_shards_is_there_whole_or_not_at_all(tmp_path):
    plan = plan_of(TENSORS)

    def raises() -> dict[str, torch.Tensor]:
        raise UserError("in the middle")

    plan.steps.append(Step((), raises))
    with pytest.raises(UserError, match="in the middle"):
        checkpoint.write_shards(tmp_path / "te", plan, 24)
    assert not list(tmp_path.iterdir())


def test_no_folder_that_holds_something_is_written_to(tmp_path):
    (tmp_path / "te").mkdir()
    checkpoint.write_shards(tmp_path / "te", plan_of(TENSORS), 24)
    with pytest.raises(UserError, match="not an empty folder; name another one"):
        checkpoint.write_shards(tmp_path / "te", plan_of(TENSORS), 24)


# The command.


PAIR = """
import parity
from torch import nn


@parity.pair("norm_linear", sizes=[dict(width=16)])
def norm_linear(te, width):
    return parity.Pair(
        reference=nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width, bias=False)),
        candidate=te.LayerNormLinear(
            width, width, bias=False, normalization="RMSNorm", zero_centered_gamma=True
        ),
        weights={parity.shift("0.weight", -1.0): "layer_norm_weight", "1.weight": "weight"},
        inputs=lambda rng, width: rng.normal(16, width),
    )
"""
MODEL = {"model.0.weight": torch.full((32,), 0.3), "model.1.weight": torch.randn(32, 32)}


@pytest.fixture
def command(tmp_path):
    (tmp_path / "conversion_pairs.py").write_text(PAIR)
    save_file(MODEL, tmp_path / "model.safetensors")
    declared = registry.cases()

    def run(*arguments: str, source: str = "model.safetensors", destination: str = "te.safetensors"):
        pair, files = tmp_path / "conversion_pairs.py", (tmp_path / source, tmp_path / destination)
        return CliRunner().invoke(app, ["convert", str(pair), *map(str, files), *arguments])

    yield run
    registry.restore(declared)


def test_the_command_writes_te_s_checkpoint_and_says_what_it_rounded(command, tmp_path):
    ended = command("--size", "width=32", "--prefix", "model.", "--dtype", "bf16")
    assert ended.exit_code == 0, ended.exception
    written = load_file(tmp_path / "te.safetensors")
    assert_same(
        written,
        {
            "layer_norm_weight": torch.full((32,), -0.7).bfloat16(),
            "weight": MODEL["model.1.weight"].bfloat16(),
            "_extra_state": torch.empty(0, dtype=torch.uint8),
        },
    )
    assert "3 tensors (2 bfloat16, 1 uint8)" in ended.stdout
    assert "rounded, as the map adds a number: 1 tensor, at most by 0.00078, in layer_norm_weight" in ended.stdout


def test_the_command_writes_a_folder_of_shards(command, tmp_path):
    folder = tmp_path / "te"
    arguments = ["--size", "width=32", "--prefix", "model.", "--shard-size", "1KiB"]
    pair, model = tmp_path / "conversion_pairs.py", tmp_path / "model.safetensors"
    ended = CliRunner().invoke(app, ["convert", str(pair), str(model), str(folder), *arguments])
    assert ended.exit_code == 0, ended.exception
    assert f"{folder}: 2 files and their index: 3 tensors (2 float32, 1 uint8)" in ended.stdout
    assert checkpoint.read(folder)["weight"].shape == (32, 32)


REFUSED = {
    "size": (["--prefix", "model."], "give the checkpoint's size"),
    "prefix": (["--size", "width=32"], '--prefix "model."'),
    "dtype": (["--dtype", "int8"], "must be one of fp64, fp32, bf16, fp16"),
    "direction": (["--to", "there"], "must be te or reference"),
    "a file without shards": (["--shard-size", "1KB"], "is a folder for the files and their index"),
    "shard size": (["--shard-size", "5 cows"], "must be such as 5GB or 500MiB"),
    "shards of nothing": (["--shard-size", "0GB"], "must be such as 5GB or 500MiB"),
    "size's text": (["--size", "width"], "must be such as hidden=4096"),
    "size's number": (["--size", "1"], "has 1, counted from 0"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_command_refuses_leaves_no_file(command, tmp_path, arguments, message):
    ended = command(*arguments)
    assert isinstance(ended.exception, UserError)
    assert message in str(ended.exception)
    assert not (tmp_path / "te.safetensors").exists()


@pytest.mark.parametrize("source", ["model.safetensors", "", "model.index.json"])
def test_the_command_does_not_replace_its_source(command, tmp_path, source):
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(MODEL, "model.safetensors")}))
    arguments = ("--size", "width=32", "--prefix", "model.")
    ended = command(*arguments, source=source, destination="model.safetensors")
    assert "would replace its source" in str(ended.exception)
    assert_same(load_file(tmp_path / "model.safetensors"), MODEL)
