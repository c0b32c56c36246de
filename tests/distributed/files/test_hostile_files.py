"""Files of strangers: small ones do not take long or much, and what is wrong with them is an error of ours.

Sizes are such that the work that a reader must not do would take hours or terabytes; the tests' own limit ends them.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save as by_torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.files.json_text import read_json, shown
from shardmath_torch.files.sealed import signed
from shardmath_torch.files.unpickled import read_metadata

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
        ("[" * 200_000, "recursion"),
        (
            '{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % ("[" * 900 + "]" * 900),
            "[[[",
        ),
        ('{"a":"%s"}' % ("x" * 100_000), "..."),
        (
            '{"a":{"dtype":"%s","shape":[],"data_offsets":[0,0]}}' % ("x" * 100_000),
            "cannot be sliced",
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
    (tmp_path / "shardmath.json").write_text(signed(json.dumps(index)))
    begun = time.process_time()
    assert len(smt.open_checkpoint(tmp_path)) == 25_000
    assert time.process_time() - begun < 6


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


def test_what_is_shown_is_short() -> None:
    """Of lists that share parts, too."""
    deep: list[object] = []
    for _ in range(200):
        deep = [deep, deep]
    assert len(shown(deep)) < 200 and len(shown("x" * 10**6)) < 200 and len(shown(10**4000)) < 200
    assert read_json(b'{"a": [1, 2.5, true, null]}') == {"a": [1, 2.5, True, None]}
