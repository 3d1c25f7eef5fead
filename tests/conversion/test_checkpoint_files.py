"""Checkpoint files: those of other programs can be read, and each file is written completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.serialization import config
from typer.testing import CliRunner

from parity.cli import app
from parity.machine import files
from parity.user_error import UserError
from parity.weights.conversion import checkpoint, manifest
from parity.weights.conversion.plan import Made, Plan, Step

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


def repacked(change=lambda parts: parts, compression=zipfile.ZIP_STORED, content=TENSORS):
    """Write an archive of ``torch.save`` again, with parts that were changed by their names in it."""

    def write(folder: Path) -> Path:
        file = saved(content)(folder)
        with zipfile.ZipFile(file) as archive:
            parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, part in change(parts).items():
                archive.writestr(f"model/{name}", part)
        return file

    return write


def without_checksums(folder: Path) -> Path:
    with config.patch("save.compute_crc32", False):
        return saved(TENSORS)(folder)


READ = {
    "repacked": (repacked(), ""),
    "without checksums": (without_checksums, ""),
    "torch.save": (saved(TENSORS), ""),
    "not an archive": (saved(TENSORS, _use_new_zipfile_serialization=False), ""),
    "an entry": (saved({"model": TENSORS, "step": 3}), "model"),
    "an entry of an entry": (saved({"state": {"model": TENSORS}}), "state.model"),
}


@pytest.mark.parametrize(("save", "within"), READ.values(), ids=READ)
def test_a_file_of_torch_save_is_read(tmp_path, save, within):
    assert_same(checkpoint.read(save(tmp_path), within), TENSORS)


BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "parts of one": {"a": BASE[1:3, 2:], "b": BASE.T, "c": BASE[:, 1], "d": BASE.flatten()[5:9]},
    "one number": {"a": torch.ones(1).expand(3, 5), "b": BASE[2, 3]},
    "negated": {"a": torch._neg_view(BASE), "b": torch.complex(BASE, BASE).conj().imag},
    "parameters": {"a": torch.nn.Parameter(BASE), "b": BASE.clone().requires_grad_()},
    "an integer's bits": {"a": BASE.view(torch.int32).view(torch.bfloat16)},
    "big-endian": {"a": BASE},
}


@pytest.mark.parametrize("name", VIEWS)
def test_whatever_torch_load_reads_is_read_as_torch_load_reads_it(tmp_path, name):
    def change(parts):
        return parts | {"byteorder": b"big"} if name == "big-endian" else parts

    file = repacked(change, content=VIEWS[name])(tmp_path)
    assert_same(checkpoint.read(file), torch.load(file, weights_only=True))


class Other:
    pass


def cut(folder: Path) -> Path:
    file = folder / "model.safetensors"
    save_file({key: x.contiguous() for key, x in TENSORS.items()}, file)
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


def shorter(parts):
    return parts | {"data/0": parts["data/0"][:-4]}


def longer(parts):
    return parts | {"data/0": parts["data/0"] + bytes(4)}


def exchanged(parts):
    return parts | {"data/0": parts["data/1"], "data/1": parts["data/0"]}


def with_a_flipped_bit(folder: Path) -> Path:
    file = saved(TENSORS)(folder)
    data = bytearray(file.read_bytes())
    data[data.find(TENSORS["a.weight"].numpy().tobytes()) + 3] ^= 64
    file.write_bytes(data)
    return file


def inflated(name):
    return repacked(lambda parts: parts | {name: parts[name] + bytes(1 << 24)}, zipfile.ZIP_DEFLATED)


UNREADABLE = {
    "compressed": (repacked(compression=zipfile.ZIP_DEFLATED), "", "is compressed, to "),
    "compressed by bzip2": (repacked(compression=zipfile.ZIP_BZIP2), "", "is compressed, to "),
    "a bomb": (inflated("data/0"), "", " of 16,77"),
    "a bomb in the pickle": (inflated("data.pkl"), "", " of 16,77"),
    "an entry that is too short": (repacked(shorter), "", "not have as many bytes as its tensors need"),
    "an entry that is too long": (repacked(longer), "", "not have as many bytes as its tensors need"),
    "entries that are exchanged": (repacked(exchanged), "", "not have as many bytes as its tensors need"),
    "a flipped bit": (with_a_flipped_bit, "", "its entry 'model/data/0' differs from its checksum"),
    "nothing": (lambda folder: folder / "no.safetensors", "", "there is no file"),
    "an empty folder": (lambda folder: folder, "", "has none of model.safetensors.index.json"),
    "another kind": (text("model.gguf", ""), "", "should end in .safetensors"),
    "cut short": (cut, "", "cannot be read as safetensors"),
    "empty": (text("model.safetensors", ""), "", "cannot be read as safetensors"),
    "an archive that is cut": (cut_archive, "", "torch"),
    "a pickle that takes what it has not": (
        repacked(lambda parts: parts | {"data.pkl": b"\x80\x02s."}),
        "",
        "cannot be read by torch.load",
    ),
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
    assert sorted(path.name for path in folder.iterdir()) == [*names, "model.safetensors.index.json", manifest.NAME]
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

    def run(*arguments: str, source: str = "model.safetensors", destination: str = "te.safetensors"):
        pair, files = tmp_path / "conversion_pairs.py", (tmp_path / source, tmp_path / destination)
        return CliRunner().invoke(app, ["convert", str(pair), *map(str, files), *arguments])

    return run


def test_the_command_writes_te_s_checkpoint_and_says_what_rounding_lost(command, tmp_path):
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
    assert "there and back is not exact: 1 tensor, at most by 0.00078, in layer_norm_weight\n" in ended.stdout


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


def test_a_source_that_is_missing_is_told_before_anything_of_the_destination(command, tmp_path):
    ended = command(source="gone", destination="te")
    assert f"there is no file {tmp_path / 'gone'}" in str(ended.exception)


@pytest.mark.parametrize("source", ["model.safetensors", "", "model.index.json"])
def test_the_command_does_not_replace_its_source(command, tmp_path, source):
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(MODEL, "model.safetensors")}))
    arguments = ("--size", "width=32", "--prefix", "model.")
    ended = command(*arguments, source=source, destination="model.safetensors")
    assert "would replace its source" in str(ended.exception)
    assert_same(load_file(tmp_path / "model.safetensors"), MODEL)


# A model as Hugging Face writes it: tied, with norms of 1 + weight, and with files beside its tensors.


TIED = """
import parity
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.tokens.weight
        self.norm = nn.Parameter(torch.full((16,), gain))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, ids):
        return self.head(self.tokens(ids))


@parity.pair("tied")
def tied(te):
    return parity.Pair(
        reference=Model(0.0),
        candidate=Model(1.0),
        weights={"tokens.weight": "tokens.weight", parity.shift("norm", 1.0): "norm"},
        inputs=lambda rng: rng.integers(2, 8, high=16),
    )
"""


@pytest.fixture
def convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tied_pairs.py").write_text(TIED)
    folder = Path("model")
    folder.mkdir()
    tensors = {
        "tokens.weight": torch.randn(16, 16),
        "norm": torch.randn(16) / 20,
        "mean": torch._neg_view(torch.ones(16)),
    }
    torch.save({key: x.bfloat16() for key, x in tensors.items()}, folder / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_text(name)
    (folder / "onnx").mkdir()

    def run(*arguments: str):
        ended = CliRunner().invoke(app, ["convert", "tied_pairs.py", *arguments])
        assert ended.exit_code == 0, ended.exception
        return ended.stdout

    return run


def test_a_tied_model_is_written_back_with_the_keys_of_the_original_and_what_was_lost_is_said(convert):
    told = convert("model", "te.safetensors")
    back = convert("te.safetensors", "back.safetensors", "--to", "reference")
    original, again = checkpoint.read(Path("model")), load_file("back.safetensors")
    assert "head.weight" in load_file("te.safetensors"), "so that it can be loaded strictly"
    assert again.keys() == original.keys()
    assert torch.equal(again["mean"], torch.full((16,), -1.0).bfloat16())
    lost = float((again["norm"].double() - original["norm"].double()).abs().max())
    assert 0.0 < lost <= 2.0**-8
    assert f"there and back is not exact: 1 tensor, at most by {lost:.2g}, in norm\n" in told
    assert "there and back is not exact: 1 tensor, at most by 0.0039, in norm\n" in back


def test_nothing_is_said_to_be_lost_where_the_map_s_number_costs_nothing(convert):
    weights = torch.tensor([0.0, 0.5, -0.25] + [0.0] * 13).bfloat16()
    held = {"tokens.weight": torch.randn(16, 16).bfloat16(), "norm": weights, "mean": weights + 1}
    save_file(held, "exact.safetensors")
    assert "there and back" not in convert("exact.safetensors", "te.safetensors")


BESIDE = ["config.json", "tokenizer.json", "vocabulary.txt"]


@pytest.mark.parametrize(
    ("source", "destination", "arguments", "copied"),
    [
        ("model", "new/te", ("--shard-size", "1KB"), BESIDE),
        ("model", "new/te/te.safetensors", (), BESIDE),
        ("model/pytorch_model.bin", "new/te/te.safetensors", (), BESIDE),
        ("model", "te.safetensors", (), None),
        ("model", "model/te.safetensors", (), None),
    ],
)
def test_files_beside_the_tensors_are_copied_to_a_new_folder(convert, source, destination, arguments, copied):
    told = convert(source, destination, *arguments)
    folder = Path(destination) if arguments else Path(destination).parent
    written = ("safetensors", manifest.NAME)
    there = {file.name for file in folder.iterdir() if not any(name in file.name for name in written)}
    if copied is None:
        assert f"not copied, as {folder.absolute()} is not a new folder: {', '.join(BESIDE)}\n" in told
        every = {file.name for file in Path("model" if folder.name == "model" else ".").iterdir()}
        assert there == every - {"te.safetensors", f"te.safetensors.{manifest.NAME}"}
    else:
        assert there == set(copied)
        assert f"\ncopied: {', '.join(copied)}\n" in told


def test_a_model_in_shards_is_the_same_after_it_was_converted_there_and_back(convert):
    tensors = {key: x.float() for key, x in checkpoint.read(Path("model")).items()} | {"norm": torch.zeros(16)}
    sharded = Path("sharded")
    sharded.mkdir()
    names = {key: f"model-{i}.safetensors" for i, key in enumerate(tensors)}
    for key, name in names.items():
        save_file({key: tensors[key]}, sharded / name)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (sharded / "config.json").write_text("config")
    for source, destination, to in (("sharded", "te", "te"), ("te", "back", "reference")):
        assert "\ncopied: config.json\n" in convert(source, destination, "--shard-size", "1KB", "--to", to)
        index = json.loads((Path(destination) / "model.safetensors.index.json").read_text())
        assert all((Path(destination) / name).is_file() for name in index["weight_map"].values())
    assert_same(checkpoint.read(Path("back")), tensors)


def test_files_beside_a_file_that_is_in_no_model_s_folder_are_not_spoken_of(convert):
    told = convert("model", "te.safetensors")
    assert "copied" in told
    assert "copied" not in convert("te.safetensors", "new/back.safetensors", "--to", "reference")
    assert [file.name for file in Path("new").glob("*[!n]")] == ["back.safetensors"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_ends_the_process_leaves_no_draft(tmp_path, number):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # it may be ignored, as under nohup

    def impatiently() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # while the first one is heeded

    with pytest.raises(SystemExit) as ended, files.ending_by_signals(), files.replacing(tmp_path / "te"):
        impatiently()
    assert ended.value.code == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.signal(number, before) is usual


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with files.ending_by_signals(), files.replacing(tmp_path / "te") as file:
            os.kill(os.getpid(), signal.SIGHUP)
            file.write(b"whole")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "te").read_bytes() == b"whole"
