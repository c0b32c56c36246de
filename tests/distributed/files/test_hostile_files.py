"""Files of strangers: small ones do not take long or much, and what is wrong with them is an error of ours.

Sizes are such that the work that a reader must not do would take hours or terabytes; the tests' own limit ends them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
import zipfile
from collections import Counter, deque
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save as by_torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints.files.json_text import read_json, shown
from shardmath_torch.checkpoints.files.sealed import BEGIN, END, sign, unseal
from shardmath_torch.checkpoints.files.unpickled import read_metadata
from shardmath_torch.checkpoints.safetensors.weights import open_weights
from shardmath_torch.groups.compat import StorageInfo

LINE = sm.Layout((6,), sm.Mesh(), "n")


def fails(path: Path, *words: str) -> str:
    """What is said of the checkpoint; it is short."""
    with pytest.raises(sm.ShardError) as raised:
        smt.load(path, {"w": LINE})
    text = str(raised.value)
    assert all(word in text for word in words) and len(text) < 1500, text[:2000]
    return text


def header(folder: Path, text: str) -> Path:
    """A safetensors file with this header and no data."""
    file = folder / "model.safetensors"
    file.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode())
    return file


def test_a_key_that_appears_twice_at_the_end(tmp_path: Path) -> None:
    """Found in one pass over 300,000 keys."""
    names = [*range(300_000), 299_999]
    fails(
        header(tmp_path, "{" + ",".join(f'"{i}":0' for i in names) + "}"), "'299999' appears twice"
    )


@pytest.mark.parametrize(
    "shape",
    [["9" * 4000] * 600, ["9"] * 200_000, ["9" * 18] * 100_000, ["9" * 5000]],
    ids=["long", "9", "18", "5000"],
)
def test_sizes_that_multiply_to_much(tmp_path: Path, shape: list[str]) -> None:
    """Nothing is multiplied that is larger than a file."""
    text = '{"a":{"dtype":"F32","shape":[' + ",".join(shape) + '],"data_offsets":[0,0]}}'
    fails(header(tmp_path, text), "damaged")


def test_sizes_of_an_index_of_ours(tmp_path: Path) -> None:
    """As in a header."""
    smt.save(tmp_path, {"w": torch.ones(6)}, {"w": LINE})
    file = tmp_path / "shardmath.json"
    index = json.loads(file.read_text())
    index["tensors"]["w"][2][0][2:] = [[0] * 100_000, [1 << 60] * 100_000]
    file.write_text(json.dumps(index))
    fails(tmp_path, "damaged")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": NaN}', "'NaN'"),
        ('{"a": -Infinity}', "'-Infinity'"),
        ('{"a": 1e999}', "'1e999'"),
        ("[" * 200_000, "while decoding a JSON array"),
        (
            '{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % ("[" * 900 + "]" * 900),
            "[[[",
        ),
        ('{"a":"%s"}' % ("x" * 100_000), "..."),
        (
            '{"a":{"dtype":"%s","shape":[],"data_offsets":[0,0]}}' % ("x" * 100_000),
            "a type that cannot be read",
        ),
    ],
    ids=["nan", "infinity", "1e999", "deep", "deep shape", "long entry", "long type"],
)
def test_json_that_is_none(tmp_path: Path, text: str, what: str) -> None:
    """Numbers that JSON has not, depth and length."""
    fails(header(tmp_path, text), what)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "../x", ""])
def test_an_index_with_a_file_that_cannot_be(tmp_path: Path, name: str) -> None:
    """What the system says of a name is an error of ours."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    fails(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_path_that_cannot_be(tmp_path: Path, name: str) -> None:
    """Also where the caller gives it."""
    fails(tmp_path / name)


def test_an_index_of_ours_with_a_file_that_cannot_be(tmp_path: Path) -> None:
    """As above."""
    smt.save(tmp_path, {"w": torch.ones(6)}, {"w": LINE})
    file = tmp_path / "shardmath.json"
    index = json.loads(file.read_text())
    index["files"][0][0] = "x" * 300
    file.write_text(json.dumps(index))
    fails(tmp_path)


def nested(depth: int, first: bytes = b"K\x01\x85") -> bytes:
    """Instructions that leave a tuple of two references to a tuple of two references ... in memo `depth`."""
    steps = (
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(depth)
    )
    return first + b"q\x00" + b"".join(steps)


DICT = b"}q\xf0"
DEEP = b"h\x3c"

PICKLES = {
    "a memo for gigabytes": b"\x80\x02Nr" + struct.pack("<I", 4_000_000_000) + b".",
    "a key": b"\x80\x02(" + nested(60) + b"e}" + DEEP + b"Ns.",
    "a key, dropped": b"\x80\x02" + nested(60) + b"0}" + DEEP + b"Ns.",
    "keys": b"\x80\x02](" + nested(60) + b"e0}(" + DEEP + b"Nu.",
    "a dict's keys": b"\x80\x02](" + nested(60) + b"e(" + DEEP + b"Nd.",
    "a set": b"\x80\x04](" + nested(60) + b"e\x8f(" + DEEP + b"\x90.",
    "pairs": b"\x80\x02]("
    + nested(60)
    + b"eccollections\nOrderedDict\n]("
    + DEEP
    + b"N\x86e\x85R.",
    "an enumeration": b"\x80\x02]("
    + nested(60)
    + b"ectorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    + DEEP
    + b"\x85R.",
    "a layout": b"\x80\x02]("
    + nested(60)
    + b"ectorch.serialization\n_get_layout\n"
    + DEEP
    + b"\x85R.",
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a long number": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".",
    "an extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_metadata_that_would_take_for_ever(tmp_path: Path, case: str) -> None:
    """Some hundred bytes of `.metadata`."""
    (tmp_path / ".metadata").write_bytes(PICKLES[case])
    fails(tmp_path, ".metadata")


def test_an_index_that_is_changed_after_it_was_a_key() -> None:
    """What was looked at as a key is looked at again."""
    text = (
        b"\x80\x02](" + nested(60) + b"ectorch.distributed.checkpoint.metadata\nMetadata\n)\x81}("
    )
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81q\xf0}(X\x03\x00\x00\x00fqnX\x01\x00\x00\x00w"
    index += b"X\x06\x00\x00\x00offsetNX\x05\x00\x00\x00indexNub"
    text += b"X\x0c\x00\x00\x00storage_data}" + index + b"Ns"
    spoilt = b"X\x01\x00\x00\x00xh\xf0}X\x03\x00\x00\x00fqn" + DEEP + b"sb"
    with pytest.raises(sm.ShardError, match="has a key"):
        read_metadata(text + spoilt + b"ub.", "here")


METADATA = b"ctorch.distributed.checkpoint.metadata\n"


def test_a_name_that_is_changed_after_it_was_a_key(tmp_path: Path) -> None:
    """Names are hashed again where they are sought."""
    text = b"\x80\x02](" + nested(60) + b"e" + METADATA + b"Metadata\n)\x81}("
    index = METADATA + b"MetadataIndex\n)\x81q\xf0}(X\x03\x00\x00\x00fqnX\x01\x00\x00\x00w"
    index += b"X\x06\x00\x00\x00offsetNX\x05\x00\x00\x00indexNub"
    text += b"X\x13\x00\x00\x00state_dict_metadata}" + index + b"NsX\x0c\x00\x00\x00storage_data"
    spoilt = b"X\x01\x00\x00\x00xh\xf0}X\x06\x00\x00\x00offset" + DEEP + b"sb"
    (tmp_path / ".metadata").write_bytes(text + b"}" + spoilt + b"ub.")
    fails(tmp_path, "has a name")


@pytest.mark.parametrize(
    "what",
    [
        METADATA + b"MetadataIndex\n",
        METADATA + b"_MEM_FORMAT_ENCODING\nK\x00\x85R",
        b"ctorch\nfloat32\n",
    ],
    ids=["a class", "a member of an enumeration", "a type of elements"],
)
def test_attributes_of_what_is_there_for_everybody(what: bytes) -> None:
    """A class with methods of a pickle's choice may be a sequence without an end."""
    with pytest.raises(sm.ShardError, match="sets attributes"):
        read_metadata(b"\x80\x02" + what + b"}X\x01\x00\x00\x00xNsb.", "here")


def deep(depth: int = 60) -> object:
    """A tuple of two references to a tuple of two references."""
    out: object = (1, 2)
    for _ in range(depth):
        out = (out, out)
    return out


@pytest.mark.parametrize("where", ["type", "transforms", "blob", "blobs", "rank", "digits"])
def test_values_that_would_take_for_ever(tmp_path: Path, where: str) -> None:
    """Where they are compared or shown, not only where they are hashed."""
    by_torch({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = found.storage_data.values()
    if where == "type":
        found.state_dict_metadata["w"].properties.dtype = deep()
    elif where == "transforms":
        info.transform_descriptors = deep()
    else:
        ranks = {
            "blob": {0: deep()},
            "blobs": deep(),
            "rank": {None: "w"},
            "digits": {"9" * 4000: "w"},
        }
        found.planner_data = {"shardmath.blobs": {"x": ranks[where]}}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    fails(tmp_path)


def test_an_index_of_many_files(tmp_path: Path) -> None:
    """In proportion to files and tensors, not to their product."""
    index = {
        "shardmath": 2,
        "save": "0" * 12,
        "files": [[f"f{i}", 0] for i in range(25_000)],
        "tensors": {f"t{i}": ["float32", [0], [[0, 0, [0], [0], ""]]] for i in range(25_000)},
        "blobs": {},
    }
    (tmp_path / "shardmath.json").write_text(sign(json.dumps(index)))
    begun = time.process_time()
    assert len(smt.open_checkpoint(tmp_path)) == 25_000
    assert time.process_time() - begun < 6


ZERO, ONE = torch.Size([0]), torch.Size([1])


def spread(what: str, many: int = 3000, long: int = 30_000) -> Metadata:
    """Metadata in which many names share something long, which a pickle has once."""
    info = StorageInfo("a/" * long + "x" if what == "path" else "x", 0, 1)
    chunk = ChunkStorageMetadata(ZERO, ONE)
    chunks = [chunk] * (long if what == "boxes" else 1)
    shape = [1] * long if what == "shape" else ONE
    part = TensorStorageMetadata(TensorProperties(torch.uint8), shape, chunks)
    at = "x" * long if what == "offset" else ZERO
    names = [f"{i}" for i in range(many)]
    index = [MetadataIndex(name, ZERO) for name in names]
    for one in index:
        object.__setattr__(one, "offset", at)
    blobs = {name: dict.fromkeys(range(long), "0") for name in names[:1]}
    shared = {"shardmath.blobs": dict.fromkeys(names, blobs["0"])}
    return Metadata(
        dict.fromkeys(names, part),
        storage_data=dict.fromkeys(index, info),
        planner_data=shared if what == "blobs" else None,
    )


@pytest.mark.parametrize("what", ["boxes", "shape", "offset", "path", "blobs"])
def test_what_many_names_share(tmp_path: Path, what: str) -> None:
    """Read once, or refused: in proportion to the file, not to names times what they share."""
    (tmp_path / "x").write_bytes(b"a")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(spread(what)))
    begun = time.process_time()
    if what == "path":
        assert len(smt.open_checkpoint(tmp_path)) == 3000
    else:
        fails(tmp_path)
    assert time.process_time() - begun < 6


def shared_by(last: bytes, long: bytes, count: int = 20_000) -> bytes:
    """Instructions that make something long, and then do something with it again and again."""
    return b"\x80\x02" + long + b"q\x00" + last * count + b"."


LONG = {
    "attributes": shared_by(
        METADATA + b"MetadataIndex\n)\x81h\x00b0",
        b"}(" + b"".join(b"X\x05\x00\x00\x00%05dN" % i for i in range(20_000)) + b"u",
    ),
    "what it is made of": shared_by(
        METADATA + b"MetadataIndex\nh\x00\x810", b"(" + b"N" * 100_000 + b"t"
    ),
    "a name that is not listed": shared_by(
        b"h\x00h\x00\x930",
        b"X" + (200_000).to_bytes(4, "little") + b"a" * 200_000,
    ),
    "a path": shared_by(
        b"cpathlib\nPosixPath\nh\x00\x85R0",
        b"X" + (200_000).to_bytes(4, "little") + b"a/" * 100_000,
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_what_is_used_again_and_again(case: str) -> None:
    """A pickle has it once."""
    begun = time.process_time()
    with pytest.raises(sm.ShardError, match="not metadata"):
        read_metadata(LONG[case], "here")
    assert time.process_time() - begun < 6


def test_a_box_that_is_missing_among_many(tmp_path: Path) -> None:
    """Named without looking at every box for each."""
    n = 20_000
    pieces = [[0, i, [i], [1], "0" * 16] for i in range(n - 1)]
    index = {"shardmath": 2, "save": "0" * 12, "files": [["x", n]], "blobs": {}}
    index["tensors"] = {"w": ["uint8", [n], pieces]}
    (tmp_path / "shardmath.json").write_text(sign(json.dumps(index)))
    (tmp_path / "x").write_bytes(bytes(n))
    begun = time.process_time()
    fails(tmp_path, f"has no box with element ({n - 1},)")
    assert time.process_time() - begun < 6


@pytest.mark.parametrize("name", ["model.safetensors", "shardmath.json", ".metadata"])
def test_a_shape_of_many_dimensions(tmp_path: Path, name: str) -> None:
    """Refused where it is read, in few words."""
    shape = [1] * 200_000
    if name == "model.safetensors":
        text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
    elif name == ".metadata":
        by_torch({"w": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
        found = pickle.loads((tmp_path / name).read_bytes())
        found.state_dict_metadata["w"].size = shape
        (tmp_path / name).write_bytes(pickle.dumps(found))
    else:
        index = {"shardmath": 2, "save": "0" * 12, "files": [], "blobs": {}}
        index["tensors"] = {"w": ["float32", shape, []]}
        (tmp_path / name).write_text(sign(json.dumps(index)))
    fails(tmp_path, "64")


PIPES = [
    "x.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    ".metadata",
    "shardmath.json",
]


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", PIPES)
@pytest.mark.timeout(30)
def test_what_is_no_regular_file(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe is not waited for, and a device has no end."""
    os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).symlink_to("/dev/zero")
    fails(tmp_path)
    with pytest.raises(sm.ShardError, match="is not a regular file"):
        open_weights(tmp_path / name)


@pytest.mark.parametrize("own", [True, False], ids=["ours", "torch's"])
@pytest.mark.timeout(60)
def test_data_that_are_no_regular_file(tmp_path: Path, own: bool) -> None:
    """What an index names is looked at before it is opened."""
    if own:
        smt.save(tmp_path, {"w": torch.ones(6)}, {"w": LINE})
        (file,) = tmp_path.glob("shardmath-*.safetensors")
    else:
        by_torch({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
        (file,) = tmp_path.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)
    fails(tmp_path, "it is not a regular file")


@pytest.mark.parametrize(
    "name", [".metadata", "shardmath-000000000000.metadata.unfinished", "shardmath.json"]
)
@pytest.mark.timeout(60)
def test_a_save_beside_a_pipe(tmp_path: Path, name: str) -> None:
    """An error where it would be read, else the save goes through; nothing waits."""
    os.mkfifo(tmp_path / name)
    if name == ".metadata":
        with pytest.raises(sm.ShardError, match="it is not a regular file"):
            smt.save(tmp_path, {"w": torch.ones(6)}, {"w": LINE})
        assert os.listdir(tmp_path) == [name]
    else:
        smt.save(tmp_path, {"w": torch.ones(6)}, {"w": LINE})
        assert smt.load(tmp_path, {"w": LINE})["w"].equal(torch.ones(6))


def test_metadata_of_torch_are_still_read(tmp_path: Path) -> None:
    """Of every protocol that torch has used."""
    state = {
        "model": {"w": torch.arange(6.0)},
        "step": 3,
        "none": None,
        "list": [torch.ones(1), {"a": 1}],
    }
    by_torch(state, checkpoint_id=tmp_path, no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    for protocol in (2, 3, 4, 5):
        read = read_metadata(pickle.dumps(found, protocol), "here")
        assert {i.fqn: i.offset for i in read.storage_data} == {
            i.fqn: i.offset for i in found.storage_data
        }
        assert read.planner_data == found.planner_data
    assert all(isinstance(index, MetadataIndex) for index in read.storage_data)


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("where", ["state_dict_metadata", "planner_data", "storage_data", "chunk"])
def test_names_that_are_not_listed_in_what_metadata_declares(tmp_path: Path, where: str) -> None:
    """Refused, however deep they are."""
    by_torch({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    if where == "chunk":
        found.state_dict_metadata["w"].chunks[0].note = [{"a": (Runs(),)}]
    else:
        setattr(found, where, {"w": Runs()})
    with pytest.raises(smt.CheckpointError, match=r"it names '(posix|nt)\.mkdir'"):
        read_metadata(pickle.dumps(found), "here")


def test_names_that_are_not_listed_in_what_metadata_does_not_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither run nor kept: lists, dicts and objects of what nobody knows, as Megatron-Core's plans are."""
    monkeypatch.chdir(tmp_path)
    by_torch({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    found.plans = [Runs(), Counter("aab"), deque([1]), {"size": slice(3)}]
    for protocol in (2, 3, 4, 5):
        read = read_metadata(pickle.dumps(found, protocol), "here")
        assert not hasattr(read, "plans") and set(read.state_dict_metadata) == {"w"}
    assert not (tmp_path / "ran").exists()


def archive(text: bytes, compress: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of torch.save with that pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compress) as file:
        file.writestr("a/data.pkl", text)
        file.writestr("a/byteorder", "little")
        file.writestr("a/data/0", b"0" * 24)
        file.writestr("a/version", "3")
    return out.getvalue()


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
ARCHIVES = {
    "a storage's key": archive(
        b"\x80\x02](" + nested(60) + b"e0" + STORAGE + DEEP + b"X\x03\x00\x00\x00cpuK\x06tQ."
    ),
    "a key": archive(b"\x80\x02](" + nested(60) + b"e0}" + DEEP + b"Ns."),
    "a long pickle": archive(b"\x80\x02" + b"N0" * 100_000 + b"N."),
    "a bomb": archive(b"\x80\x02" + b"N0" * 50_000_000 + b"N.", zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_would_take_for_ever(tmp_path: Path, case: str) -> None:
    """A data file of torch, which torch itself would not get through."""
    by_torch({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    (tmp_path / info.relative_path).write_bytes(ARCHIVES[case])
    info.offset, info.length = 0, len(ARCHIVES[case])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    fails(tmp_path, "archive")


def of_torch(folder: Path, data: bytes, places: list[tuple[int, int]]) -> sm.Layout:
    """A checkpoint of torch with a box of one byte in each of these archives (offset, length) of one file."""
    (folder / "x").write_bytes(data)
    chunks = [ChunkStorageMetadata(torch.Size([i]), ONE) for i in range(len(places))]
    size = torch.Size([len(places)])
    part = TensorStorageMetadata(TensorProperties(torch.uint8), size, chunks)
    infos = {
        MetadataIndex("w", chunk.offsets): StorageInfo("x", *place)
        for chunk, place in zip(chunks, places, strict=True)
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": part}, storage_data=infos)))
    return sm.Layout((len(places),), sm.Mesh(), "n", dtype="uint8")


def with_records(count: int) -> bytes:
    """What torch.save makes of a byte, and records that nobody asks for."""
    out = io.BytesIO()
    torch.save(torch.ones(1, dtype=torch.uint8), out)
    with zipfile.ZipFile(out, "a") as file:
        for i in range(count):
            file.writestr(f"archive/z{i}", b"")
    return out.getvalue()


def test_an_archive_that_many_boxes_share(tmp_path: Path) -> None:
    """Looked into once."""
    data = with_records(2000)
    layout = of_torch(tmp_path, data, [(0, len(data))] * 2000)
    begun = time.process_time()
    assert smt.load(tmp_path, {"w": layout})["w"].equal(torch.ones(2000, dtype=torch.uint8))
    assert time.process_time() - begun < 20


def test_archives_that_overlap(tmp_path: Path) -> None:
    """Refused: each would be read for every byte before it."""
    data = with_records(2000)
    layout = of_torch(
        tmp_path, bytes(2000) + data, [(i, len(data) + 2000 - i) for i in range(2000)]
    )
    begun = time.process_time()
    with pytest.raises(sm.ShardError, match="has two archives that overlap"):
        smt.load(tmp_path, {"w": layout})
    assert time.process_time() - begun < 6


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("archive/data.pkl", b"N0" * 32_000 + b"N.", "it lists 20000 pickles"),
        ("archive/byteorder", b"little" * 100_000, "not little-endian"),
    ],
)
def test_a_directory_that_lists_a_record_often(
    tmp_path: Path, name: str, text: bytes, what: str
) -> None:
    """It is not read as often."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(name, text)
        file.filelist.extend(file.filelist * 19_999)
    layout = of_torch(tmp_path, out.getvalue(), [(0, len(out.getvalue()))])
    begun = time.process_time()
    with pytest.raises(sm.ShardError, match=what):
        smt.load(tmp_path, {"w": layout})
    assert time.process_time() - begun < 6


@pytest.mark.parametrize("where", ["header", "index", "index of a header"])
def test_names_in_errors_are_short(tmp_path: Path, where: str) -> None:
    """A name may be as long as a header."""
    name = "x" * 100_000
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    if where == "header":
        header(tmp_path, json.dumps({name: entry | {"data_offsets": [3, 3]}}))
        fails(tmp_path, "begins at byte 3")
        return
    header(tmp_path, json.dumps({"w": entry})).rename(tmp_path / "a.safetensors")
    files = {name: "a.safetensors"} if where == "index of a header" else {"w": "x" * 250, "v": "y"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    fails(tmp_path, "no file of the index" if where == "index of a header" else "cannot be found")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (BEGIN + b"\xff" + (1).to_bytes(8, "little") + b"0" * 12, "can't decode"),
        (BEGIN + b"{}" + (2).to_bytes(8, "little") + b"\xff" * 12, "can't decode"),
        (BEGIN + b"{}" + (99).to_bytes(8, "little") + b"0" * 12, "no index of "),
        (BEGIN + b"{}" + b"\xff" * 8 + b"0" * 12, "no index of "),
        (BEGIN, "no index of "),
        (b"", "no index of "),
    ],
)
def test_a_checksum_that_holds_of_what_was_not_sealed(body: bytes, what: str) -> None:
    """Anybody can make one."""
    with pytest.raises(
        smt.CheckpointError, match=f"is damaged: its checksum is right, but .*{what}"
    ):
        unseal(body + sha256(body).digest() + END, "here")


def test_what_is_shown_is_short() -> None:
    """Of lists that share parts, too."""
    deep: list[object] = []
    for _ in range(200):
        deep = [deep, deep]
    assert len(shown(deep)) < 200 and len(shown("x" * 10**6)) < 200 and len(shown(10**4000)) < 200
    assert read_json(b'{"a": [1, 2.5, true, null]}') == {"a": [1, 2.5, True, None]}
