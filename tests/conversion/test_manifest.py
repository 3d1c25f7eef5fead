"""A converted checkpoint says what it is made of; a torn or mixed one is refused; a killed conversion continues."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from parity.cli import app
from parity.machine import files
from parity.user_error import UserError
from parity.weights.conversion import checkpoint, manifest
from parity.weights.conversion.manifest import Record
from parity.weights.conversion.plan import Made, Plan, Step

PAIR = """
import parity
from torch import nn


@parity.pair("stacked")
def stacked(te):
    return parity.Pair(
        nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in "qkv"}),
        nn.ModuleDict({name: te.Linear(16, 16, bias=False) for name in "qkv"}),
        lambda rng: rng.normal(2, 16),
        {f"{name}.weight": f"{name}.weight" for name in "qkv"},
    )
"""


@pytest.fixture
def convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pairs.py").write_text(PAIR)
    for seed, folder in enumerate(("source", "another")):
        torch.manual_seed(seed)
        Path(folder).mkdir()
        save_file({f"{name}.weight": torch.randn(16, 16) for name in "qkv"}, f"{folder}/model.safetensors")

    def run(*arguments: str) -> str:
        ended = CliRunner().invoke(app, ["convert", "pairs.py", *arguments, "--backend", "cpu", "-q"])
        if isinstance(ended.exception, UserError):
            raise ended.exception
        return ended.stdout

    return run


SHARDS = ("--shard-size", "1KB")
FORMS = {"a file": ("te.safetensors", ()), "shards": ("te", SHARDS), "dcp": ("te", ("--format", "dcp"))}


@pytest.mark.parametrize(("destination", "arguments"), FORMS.values(), ids=FORMS)
def test_the_manifest_has_every_file_of_both_sides(convert, destination, arguments):
    convert("source", destination, *arguments)
    path = Path(destination)
    beside = path / manifest.NAME if path.is_dir() else Path(f"{path}.{manifest.NAME}")
    told = json.loads(beside.read_text())
    own = [file for file in path.iterdir() if file != beside] if path.is_dir() else [path]
    for there, listed in ((own, told["files"]), ([Path("source/model.safetensors")], told["source"])):
        sums = {x.name: (x.stat().st_size, hashlib.sha256(x.read_bytes()).hexdigest()) for x in there}
        assert {name: (mark["bytes"], mark["sha256"]) for name, mark in listed.items()} == sums
    assert told["tensors"] == 6
    assert told["conversion"]["pair"] == "pairs.py"
    assert told["conversion"]["source"] == "source"


def torn(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def of_another(file: Path) -> None:
    """Put a file there that another conversion has made, which differs in its numbers alone."""
    if not Path("other").exists():
        CliRunner().invoke(app, ["convert", "pairs.py", "another", "other", *SHARDS, "--backend", "cpu", "-q"])
    shutil.copyfile(Path("other") / file.name, file)


def damaged_manifest(file: Path) -> None:
    (file.parent / manifest.NAME).write_text("{")


BROKEN = {
    torn: "model-00002-of-00003.safetensors is not as te/parity.manifest.json says: it has 1,.* bytes, not 1,",
    changed: "model-00002-of-00003.safetensors is not as .* says: it has another content",
    of_another: "model-00002-of-00003.safetensors is not as .* says: it has another content",
    damaged_manifest: "te/parity.manifest.json cannot be read: not JSON",
}


@pytest.mark.parametrize(("damage", "told"), BROKEN.items())
def test_a_torn_or_mixed_checkpoint_is_refused_with_the_file_s_name(convert, damage, told):
    convert("source", "te", *SHARDS)
    damage(Path("te/model-00002-of-00003.safetensors"))
    with pytest.raises(UserError, match=told):
        convert("te", "back.safetensors", "--to", "reference")
    assert not list(Path().glob("back*"))
    ended = CliRunner().invoke(app, ["prove", "source", "te", "--port", "pairs.py", "--backend", "cpu", "-q"])
    assert isinstance(ended.exception, UserError)
    assert re.search(told, str(ended.exception))


def test_without_a_manifest_or_checksums_what_is_there_is_taken(convert):
    convert("source", "te", *SHARDS, "--no-checksums")
    changed(Path("te/model-00002-of-00003.safetensors"))
    convert("te", "back.safetensors", "--to", "reference")
    Path("te", manifest.NAME).unlink()
    convert("te", "again.safetensors", "--to", "reference")
    assert Path("again.safetensors").read_bytes() == Path("back.safetensors").read_bytes()


def test_a_file_that_replaces_another_one_has_its_own_manifest(convert):
    convert("source", "te.safetensors")
    convert("another", "te.safetensors")
    convert("te.safetensors", "back.safetensors", "--to", "reference")


# What was begun.


def plan_of(step: Callable[[int], None], count: int = 4, map_checksum: str = "") -> Plan:
    """Return a plan of equal tensors, one for each file; ``step`` is called before each is computed."""

    def compute(i: int) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: step(i) or {f"{i}": torch.full((4,), float(i))}

    steps = [Step((Made(f"{i}", (4,), torch.float32),), compute(i)) for i in range(count)]
    return Plan(tuple(map(str, range(count))), steps, map_checksum=map_checksum)


def killed_at(number: int) -> Callable[[int], None]:
    def step(i: int) -> None:
        if i == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def begin(folder: Path) -> Path:
    """Begin a conversion that is killed at its third file, and return what is left of it."""
    if (child := os.fork()) == 0:
        checkpoint.write_shards(folder, plan_of(killed_at(2)), 16)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not folder.exists()
    return folder.with_name(f"{folder.name}.partial")


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("damage", [None, torn, changed])
def test_a_conversion_that_was_killed_goes_on_where_it_was(tmp_path, damage):
    draft = begin(tmp_path / "te")
    whole = set(json.loads((draft / manifest.NAME).read_text())["files"])  # the last one may not have been read yet
    if damage is not None:
        damage(draft / "model-00001-of-00004.safetensors")
        whole.discard("model-00001-of-00004.safetensors")
    computed: list[int] = []
    record = Record()
    checkpoint.write_shards(tmp_path / "te", plan_of(computed.append), 16, record)
    assert record.continued == whole
    assert computed == [i for i in range(4) if f"model-0000{i + 1}-of-00004.safetensors" not in whole]
    checkpoint.write_shards(tmp_path / "at_once", plan_of(lambda i: None), 16)
    assert content_of(tmp_path / "te") == content_of(tmp_path / "at_once")
    assert not draft.exists()


def test_what_is_unfinished_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="has none of"):
        checkpoint.read(begin(tmp_path / "te"))


def test_another_conversion_does_not_go_on_with_it(tmp_path):
    draft = begin(tmp_path / "te")
    before = content_of(draft)
    for plan, record, told in (
        (plan_of(lambda i: None, map_checksum="another"), Record(), "weight map"),
        (plan_of(lambda i: None, 5), Record(), "tensors or files of the source"),
        (plan_of(lambda i: None), Record({"prefix": ["model."]}), "prefix"),
    ):
        with pytest.raises(UserError, match=f"unfinished conversion that differs in {told}; delete it"):
            checkpoint.write_shards(tmp_path / "te", plan, 16, record)
    assert content_of(draft) == before


def test_two_conversions_do_not_write_to_one_folder(tmp_path):
    draft = begin(tmp_path / "te")
    with files.claimed(draft / manifest.NAME), pytest.raises(UserError, match="another run is writing"):
        checkpoint.write_shards(tmp_path / "te", plan_of(lambda i: None), 16)
    assert (draft / "model-00001-of-00004.safetensors").exists()


def test_a_folder_that_only_has_the_name_of_an_unfinished_one_is_left_alone(tmp_path):
    (tmp_path / "te.partial").mkdir()
    (tmp_path / "te.partial" / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match="is in the way and is no unfinished conversion"):
        checkpoint.write_shards(tmp_path / "te", plan_of(lambda i: None), 16)
    assert content_of(tmp_path / "te.partial") == {"diary.txt": b"mine"}


@pytest.mark.parametrize("ended", [OSError(errno.ENOSPC, "No space left on device"), SystemExit(143)])
def test_what_was_written_stays_if_the_disk_is_full_or_a_signal_comes(tmp_path, ended):
    def stop(i: int) -> None:
        if i == 3:
            raise ended

    with pytest.raises((UserError, SystemExit)):
        checkpoint.write_shards(tmp_path / "te", plan_of(stop), 16)
    record = Record()
    checkpoint.write_shards(tmp_path / "te", plan_of(lambda i: None), 16, record)
    assert record.continued
