"""Read checkpoints in common formats without loading them into memory, and write one tensor after the other."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parity import data_files
from parity.machine import files
from parity.progress import Following, followed
from parity.shown import one_line
from parity.user_error import UserError
from parity.weights.conversion import manifest
from parity.weights.conversion.distributed import DATA, METADATA, read_distributed, write_distributed
from parity.weights.conversion.manifest import FileMark, Record
from parity.weights.conversion.plan import Made, Plan, Step, is_extra_state

# Read a file, or the files that an index names. Tensors are memory-mapped, so that only those that are used are read.


INDEX = ".index.json"
SAFETENSORS = ".safetensors"
_IN_SHARDS = "model.safetensors.index.json"  # the name that Hugging Face gives the index
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WEIGHTS = (INDEX, SAFETENSORS, *_TORCH, ".gguf", ".h5", ".msgpack", ".onnx", METADATA, DATA, manifest.NAME)
_IN_FOLDER = (_IN_SHARDS, "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


def read(path: Path, within: str = "") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, on the CPU, by their keys.

    Args:
        path: a file of safetensors or of ``torch.save``, an index ``*.index.json`` of several, a folder with one of
            these under the name that Hugging Face gives it, or one of ``torch.distributed.checkpoint``.
        within: for what ``torch.save`` or ``torch.distributed.checkpoint`` wrote, the entry that holds the model, such
            as ``model``; dots join nested ones.

    Raises:
        UserError: if there is no such file, it is damaged, its manifest says that it is another one, or it holds
            anything but tensors.
    """
    manifest.check(files_of(path))
    if (path / METADATA).is_file():
        return read_distributed(path, within)
    path = _find_file(path)
    return _of_index(path, within) if path.name.endswith(INDEX) else _of_file(path, within)


def files_of(path: Path) -> list[Path]:
    """Return the files that ``read`` reads, an index first.

    Raises:
        UserError: if there is no such file, or it is an index that cannot be read.
    """
    if (path / METADATA).is_file():
        return [path / METADATA, *sorted(path.glob(f"*{DATA}"))]
    path = _find_file(path)
    shards = dict.fromkeys(_read_index(path).values()) if path.name.endswith(INDEX) else ()
    return [path, *map(path.with_name, shards)]


def files_beside(source: Path) -> list[Path]:
    """Return the files of a model's folder that hold no tensors, such as its configuration and its tokenizer.

    Args:
        source: the folder, or a file in one that has a ``config.json``, as Hugging Face writes it.
    """
    folder = source if source.is_dir() else source.parent
    is_model = folder is source or (folder / "config.json").is_file()
    return [
        file for file in sorted(folder.iterdir()) if is_model and file.is_file() and not file.name.endswith(_WEIGHTS)
    ]


def _find_file(path: Path) -> Path:
    """Return the file itself, or the one that a folder holds."""
    if path.is_dir():
        there = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if not there:
            raise UserError(f"the folder {path} has none of {', '.join((*_IN_FOLDER, METADATA))}; name the file")
        path = there[0]
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return path


def _read_index(path: Path) -> dict[str, str]:
    """Return which file holds each key, as an index says."""
    try:
        return data_files.parsed(data_files.bytes_of(path, ""), _weight_map)
    except data_files.NotReadableError as error:
        raise UserError(f"{path}: {error}") from None


def _of_index(path: Path, within: str) -> dict[str, Tensor]:
    """Return the tensors of the files that an index names."""
    places = _read_index(path)
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(places.values()):
        shard = path.with_name(name)
        if not os.path.isfile(shard):  # Path.is_file raises if a name is too long
            raise UserError(f"{path} names {name!r}, which is not beside it; was it downloaded whole?")
        held = _of_file(shard, within)
        for key in (key for key, place in places.items() if place == name):
            if key not in held:
                raise UserError(f"{path} says that {name!r} holds {key!r}, but it does not")
            found[key] = held[key]
    return {key: found[key] for key in places}


def _weight_map(value: Any) -> dict[str, str]:
    """Return which file holds each key."""
    places = value["weight_map"]
    for key, name in places.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise data_files.NotReadableError(f"it says that {key!r} is in {name!r}, which is no file's name")
    return dict(places)


def _of_file(path: Path, within: str) -> dict[str, Tensor]:
    if path.suffix == SAFETENSORS:
        if within:
            raise UserError(f"{path} is a file of safetensors, which has no nested entries such as {within!r}")
        return _of_safetensors(path)
    if path.suffix in _TORCH:
        return _of_torch(path, within)
    raise UserError(
        f"{path} should end in {SAFETENSORS}, in {INDEX}, or, as a file of torch.save, in one of {', '.join(_TORCH)}"
    )


def _of_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError as error:
        raise UserError(f"reading {path} needs safetensors: pip install safetensors") from error
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in list(opened.keys())}
    except Exception as error:  # the library raises one kind, PyTorch others, for a file that is cut short
        raise UserError(f"{path} cannot be read as safetensors: {one_line(error)}") from None


def _of_torch(path: Path, within: str) -> dict[str, Tensor]:
    held = _load_torch_file(path)
    for entry in filter(None, within.split(".")):
        if not isinstance(held, Mapping) or entry not in held:
            raise UserError(f"{path} has no entry {within!r}; {_describe_entries(held)}")
        held = held[entry]
    if not isinstance(held, Mapping) or not held:
        raise UserError(f"{path} holds a {type(held).__name__}, and no state dict")
    held = {key: value for key, value in held.items() if isinstance(value, Tensor) or not is_extra_state(str(key))}
    for key, value in held.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise UserError(
                f"{path} holds more than tensors: its {key!r} is a {type(value).__name__}; if the model is one "
                f"of its entries, name it with --within; {_describe_entries(held)}"
            )
    return dict(held)


def _describe_entries(held: Any) -> str:
    if not isinstance(held, Mapping):
        return f"it holds a {type(held).__name__}"
    shown = [str(key) for key in held][:8]
    return f"it has {', '.join(shown)}{', ...' if len(held) > len(shown) else ''}"


def _load_torch_file(path: Path) -> Any:
    """Return what ``torch.save`` wrote, without running code that the file names."""
    mapped: list[tuple[int, int]] = []

    def note(storage: Any, _: str) -> Any:
        mapped.append((storage.data_ptr(), storage.nbytes()))
        return storage

    try:
        places = _places_of_entries(path)
        held = torch.load(path, map_location=note, weights_only=True, mmap=bool(places))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors and plain values, or is damaged, so that it is not read "
            f"(weights_only=True): {one_line(error)}; save the module's state_dict() alone"
        ) from None
    except UserError:
        raise
    except Exception as error:  # PyTorch's unpickler raises anything for a damaged file
        raise UserError(f"{path} cannot be read by torch.load: {one_line(error)}") from None
    # PyTorch maps as many bytes as the pickle asks for, whatever the entry has. Each storage must be a whole entry; the
    # address of the file's first byte is the one for which all of them are.
    starts = [{address - place for place, length in places if length == size} for address, size in mapped if size]
    if places and starts and not set.intersection(*starts):
        raise UserError(f"{path} is damaged: its entries do not have as many bytes as its tensors need")
    return held


def _places_of_entries(path: Path) -> list[tuple[int, int]]:
    """Return where in an archive the bytes of each entry begin, and how many there are.

    Files from before PyTorch 1.6 are no archives, and have none.

    Raises:
        UserError: if the entries cannot be mapped because they are compressed, or differ from their checksums.
        zipfile.BadZipFile: if it is no whole archive.
    """
    places: list[tuple[int, int]] = []
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":
            return places
        archive = zipfile.ZipFile(file)
        entries = archive.infolist()
        if any(one.compress_type for one in entries):
            raise UserError(
                f"{path} is compressed, to {path.stat().st_size:,} of {sum(one.file_size for one in entries):,} bytes, "
                "so that no tensor can be read by itself; if you trust where it is from, write it anew: "
                f"torch.save(torch.load({str(path)!r}, weights_only=True), ...)"
            )
        # Without checksums (``torch.utils.serialization.config.save.compute_crc32``), all of them are 0.
        if any(one.CRC for one in entries) and (wrong := archive.testzip()):
            raise UserError(f"{path} is damaged: its entry {wrong!r} differs from its checksum")
        for one in entries:
            file.seek(one.header_offset + 26)  # the lengths of the name and of the extra field, which precede the bytes
            lengths = struct.unpack("<HH", file.read(4))
            places.append((file.tell() + sum(lengths), one.file_size))
    return places


# Write safetensors. The library's own writer wants all tensors at once; this one asks for them one after the other.
#
# The format (github.com/huggingface/safetensors, README): the header's length in 8 bytes, little-endian; the header in
# JSON, which has dtype, shape and place of each tensor; the tensors' bytes, without gaps. As the header is padded with
# spaces to a multiple of 8, and wide dtypes come first, each tensor is at a multiple of its width.


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(path: Path, plan: Plan, record: Record | None = None) -> int:
    """Write what a conversion makes as one file of safetensors, completely or not at all, and show the progress.

    Args:
        path: the file, which is replaced if it is there.
        plan: the conversion, whose steps are computed one after the other.
        record: of what it is, for the manifest beside the file.

    Returns:
        How many bytes the file has.

    Raises:
        UserError: if the file cannot be written, a tensor's dtype has no name in the format, a step raises it, or the
            source is not as its own manifest says.
    """
    beside = path.with_name(f"{path.name}.{manifest.NAME}")
    with told_if_unwritten(path), record or Record() as record:
        with files.replacing(path) as file:
            size = _write_tensors(file, followed(plan.steps, "converting"), plan.steps)
            record.check_sources()
            beside.unlink(missing_ok=True)  # so that a file whose manifest is not yet written has none
        record.add(path)
        files.replace(beside, record.manifest(plan).to_json())
    return size


def write_shards(
    folder: Path, plan: Plan, largest: int, record: Record | None = None, beside: Sequence[Path] = ()
) -> list[int]:
    """Write what a conversion makes as files of safetensors in a folder, with an index, as Hugging Face does.

    The folder appears only when all of it is written. If the process ends before, what it has written stays beside it,
    and the next call with the same arguments goes on from there.

    Args:
        folder: where to write; it must not exist, or be empty.
        plan: the conversion, whose steps are computed one after the other.
        largest: how many bytes of tensors a file may have. Tensors of one step are in one file, even if they are
            larger.
        record: of what it is, for the manifest in the folder.
        beside: files that are copied to it.

    Returns:
        How many bytes each file of tensors has.

    Raises:
        UserError: as ``write``; if the folder is not empty, or what is beside it is of another conversion.
    """
    shards = _divide_into_shards(plan, largest)
    names = [f"model-{i:05}-of-{len(shards):05}{SAFETENSORS}" for i in range(1, len(shards) + 1)]
    keys = {made.key: name for name, steps in zip(names, shards, strict=True) for step in steps for made in step.made}
    size = sum(made.bytes for step in plan.steps for made in step.made)
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(keys.items()))}, indent=2) + "\n"
    record = record or Record()
    with (
        _unfinished_folder(folder, plan, record, index, beside) as claim,
        Following("converting", len(plan.steps)) as following,
    ):
        draft = claim.path.parent
        read: Future[FileMark] | None = None
        for name, steps in zip(names, shards, strict=True):
            if name in record.continued:
                for _ in _follow_steps(steps, following):
                    pass
                continue
            with files.replacing(draft / name) as file:
                _write_tensors(file, _follow_steps(steps, following), steps)
            if read is not None:  # the checksum of the file before
                read.result()
            read = record.add(draft / name)
            claim.replace(record.manifest(plan, index, wait=False).to_json())
        files.replace(draft / _IN_SHARDS, index)
        record.add(draft / _IN_SHARDS)
    return [(folder / name).stat().st_size for name in names]


def write_folder(folder: Path, plan: Plan, record: Record | None = None, beside: Sequence[Path] = ()) -> list[int]:
    """Write what a conversion makes as a folder of ``torch.distributed.checkpoint``, which appears when all is written.

    The arguments, what is returned and what is raised are as for ``write_shards``, but each call begins anew.
    """
    record = record or Record()
    with _unfinished_folder(folder, plan, record, "", beside) as claim:
        draft = claim.path.parent
        written = write_distributed(draft, plan)
        for file in sorted(draft.iterdir()):
            if file.name != manifest.NAME:
                record.add(file)
    return written


@contextmanager
def _unfinished_folder(
    folder: Path, plan: Plan, record: Record, layout: str, beside: Sequence[Path]
) -> Iterator[files.Claim]:
    """Yield the claimed manifest of ``FOLDER.partial``, which becomes the folder when the context ends.

    The manifest has the files that are whole. They stay if the process is killed or something cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not an empty folder; name another one")
    target = Path(os.path.realpath(folder))
    draft = target.with_name(f"{target.name}.partial")
    if draft.exists() and not (draft / manifest.NAME).is_file() and (not draft.is_dir() or any(draft.iterdir())):
        raise UserError(f"{draft} is in the way and is no unfinished conversion; move it, or name another folder")
    with told_if_unwritten(folder), record, files.claimed(draft / manifest.NAME) as claim:
        _take_up(claim, plan, record, layout)
        try:
            yield claim
            record.check_sources()
            for file in beside:
                shutil.copyfile(file, draft / file.name)
            claim.replace(record.manifest(plan, layout).to_json())
            if target.exists():
                shutil.copymode(target, draft)
            os.replace(draft, target)
        except Exception as error:
            if not isinstance(error, OSError):  # which another call may not meet
                shutil.rmtree(draft)
            raise


def _take_up(claim: files.Claim, plan: Plan, record: Record, layout: str) -> None:
    """Find which files of an unfinished conversion are whole, and remove the others.

    Raises:
        UserError: if it is another conversion.
    """
    draft = claim.path.parent
    if content := claim.content():
        before = manifest.parse(content, claim.path)
        if differences := before.differences(record.manifest(plan, layout, wait=False)):
            raise UserError(
                f"{draft} is an unfinished conversion that differs in {', '.join(differences)}; delete it to begin "
                "anew, or name another folder"
            )
        plan.rounded.update(before.rounded)
        there = {name: record.add(draft / name) for name in before.files if layout and (draft / name).is_file()}
        record.continued = {name for name, mark in there.items() if mark.result() == before.files[name]}
    for file in draft.iterdir():
        if file.name not in (*record.continued, manifest.NAME):
            file.unlink()
    claim.replace(record.manifest(plan, layout, wait=False).to_json())


def _divide_into_shards(plan: Plan, largest: int) -> list[list[Step]]:
    """Divide the steps among files, in the module's order, so that layers stay together."""
    place = {key: i for i, key in enumerate(plan.order)}
    shards: list[list[Step]] = [[]]
    size = 0
    for step in sorted(plan.steps, key=lambda step: min((place.get(made.key, 0) for made in step.made), default=0)):
        more = sum(made.bytes for made in step.made)
        if shards[-1] and more and size + more > largest:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += more
    return shards


def _follow_steps(steps: list[Step], following: Following) -> Iterator[Step]:
    for step in steps:
        yield step
        following.step()


def _write_tensors(file: BinaryIO, steps: Iterable[Step], planned: list[Step]) -> int:
    """Write a file's content and return its size in bytes; ``steps`` yields the planned steps and shows progress."""
    header, places, size = _make_header([one for step in planned for one in step.made])
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for step in steps:
        for key, tensor in step.compute().items():
            _write_tensor(file, len(header) + 8 + places[key], tensor)
    file.truncate(len(header) + 8 + size)
    return len(header) + 8 + size


def _make_header(made: list[Made]) -> tuple[bytes, dict[str, int], int]:
    """Return the header, where each tensor begins after it, and how many bytes they have together."""
    places: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for one in sorted(made, key=lambda one: (-one.dtype.itemsize, one.key)):
        if one.dtype not in _NAMES:
            raise UserError(f'"{one.key}" holds {one.dtype}, for which safetensors has no name here')
        places[one.key] = end
        end += one.bytes
        entries[one.key] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [places[one.key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), places, end


def _write_tensor(file: BinaryIO, place: int, tensor: Tensor) -> None:
    file.seek(place)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)


@contextmanager
def told_if_unwritten(path: Path) -> Iterator[None]:
    """Turn a failure to write in this context into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
