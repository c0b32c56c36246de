"""Exports: whole tensors from any layouts, as transformers, vLLM's loader and safetensors itself read them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import shardmath as sm
import shardmath_torch as smt
from shardmath.layouts.store import flat_windows
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.safetensors import hf_folder
from shardmath_torch.checkpoints.safetensors.headers import WeightsError
from shardmath_torch.checkpoints.safetensors.hf_folder import LOCK
from shardmath_torch.checkpoints.safetensors.hf_split import size_of, split
from shardmath_torch.checkpoints.safetensors.slices import load
from shardmath_torch.checkpoints.safetensors.weights import open_weights
from shardmath_torch.moves.observing.bars import Tally
from tests.distributed.pool import Pool
from tests.distributed.tasks import checkpoints as work

DP, ODD = sm.Mesh(dp=4, tp=2), sm.Mesh(dp=2, tp=2, ranks=(7, 0, 3, 5))
LAYOUTS: dict[str, Any] = {
    "layers.10.w": sm.Layout((13, 6), DP, "(tp dp n) h"),
    "layers.2.w": sm.Layout((13, 6), DP, "([7 3 3] tp n | dp n) h", dtype="bfloat16"),
    "layers.2.b": sm.Layout((13,), ODD, "(dp n)", dtype="float8_e4m3fn"),
    "scale": sm.Layout((), DP, "", dtype="float8_e8m0fnu"),
    "flags": sm.Layout((5, 3), sm.Mesh(ranks=[6]), {}, dtype="bool"),
    "empty": sm.Layout((0, 4), DP, "(dp n) h", dtype="int64"),
    **{f"x{i}": sm.Layout((i + 1,), DP, "(dp n)") for i in range(4)},
    "padded": sm.Layout((10, 4), DP, "(tp n)=12 h", dtype="int64"),
    "flat": flat_windows("flat", (5, 2), {0: (0, 3), 5: (3, 10)}, dtype="float16")[0],
}
INDEX = "model.safetensors.index.json"


def by_vllms_rules(folder: Path) -> dict[str, torch.Tensor]:
    """What vLLM's loader reads: of all `*.safetensors` those of the index, each file's keys, no name twice.

    As `filter_duplicate_safetensors_files` and `safetensors_weights_iterator` do it (vllm 0.33 weight_utils.py).
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        files = [
            file for file in files if str(file) in {str(folder / name) for name in places.values()}
        ]
    out: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 -- it is no mapping
                assert name not in out
                out[name] = stored.get_tensor(name)
    return out


def written(folder: Path) -> dict[str, str]:
    """Every file's content."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


def numbers(layouts: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The element numbers, whole."""
    firsts = {name: work.windows(one)[0] for name, one in layouts.items()}
    return {name: work.elements(one.shape, one.dtype) for name, one in firsts.items()}


def check(folder: Path, layouts: dict[str, Any] = LAYOUTS) -> None:
    """All tensors are there, by vLLM's rules and by ours."""
    wanted, found = numbers(layouts), by_vllms_rules(folder)
    assert found.keys() == wanted.keys() and all(
        work.same(found[name], wanted[name]) for name in wanted
    )
    alone = {name: alone_of(t) for name, t in wanted.items()}
    assert work.loaded(0, str(folder), alone) == []


def alone_of(tensor: torch.Tensor) -> sm.Layout:
    """Of one process."""
    return sm.Layout(
        tuple(tensor.shape), sm.Mesh(), {}, dtype=str(tensor.dtype).removeprefix("torch.")
    )


def test_from_any_layouts_on_eight_ranks(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file, in a few, in more than there are ranks; and one process writes the same bytes."""
    for size, count in ((2000, 1), ("0.2KB", 4), (1, 11)):
        folder, alone = tmp_path / str(count), tmp_path / f"{count} alone"
        assert pool.run(work.exported, str(folder), LAYOUTS, {"max_shard_size": size}) == [None] * 8
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert sorted(os.listdir(folder)) == [*names, INDEX]
        check(folder)
        here = {name: alone_of(t) for name, t in numbers(LAYOUTS).items()}
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[smt.export.__module__], "BATCH", 100)
            smt.export(alone, numbers(LAYOUTS), here, max_shard_size=size)
        assert written(alone) == written(folder)


def test_an_export_replaces_another(pool: Pool, tmp_path: Path) -> None:
    """Nothing of the former stays, also of one that was cut off; other files are left alone."""
    (tmp_path / "config.json").write_text("{}")
    pool.run(work.exported, str(tmp_path), LAYOUTS, {"max_shard_size": 1})
    (tmp_path / "model-00009-of-00009.safetensors.unfinished").write_text(
        "of an export that was cut off"
    )
    few = {name: LAYOUTS[name] for name in ("layers.2.w", "flat")}
    assert pool.run(work.exported, str(tmp_path), few, {}) == [None] * 8
    assert sorted(os.listdir(tmp_path)) == [
        "config.json",
        "model-2-00001-of-00001.safetensors",
        INDEX,
    ]
    check(tmp_path, few)


def test_an_export_that_fails_leaves_the_former(pool: Pool, tmp_path: Path) -> None:
    """A disk that is full for one rank is an error on all, which names it."""
    pool.run(work.exported, str(tmp_path), LAYOUTS, {"max_shard_size": 1})
    before = written(tmp_path)
    errors = pool.run(work.exported, str(tmp_path), LAYOUTS, {"max_shard_size": 200}, 2)
    assert all(
        "rank 2 could not write its file: the disk cannot be written: No space" in error[1]
        for error in errors
    )
    assert written(tmp_path) == before
    check(tmp_path)


def in_three(folder: Path, value: float) -> None:
    """An export of three files."""
    layouts = {name: sm.Layout((4,), sm.Mesh(), {}) for name in "abc"}
    smt.export(
        folder, {name: torch.full((4,), value) for name in layouts}, layouts, max_shard_size=1
    )


def values(folder: Path) -> dict[str, float]:
    """What an export of three files is, by the index."""
    assert (folder / INDEX).is_file()
    return {name: float(t[0]) for name, t in by_vllms_rules(folder).items()}


def fails(patch: pytest.MonkeyPatch, step: int, error: BaseException, lasting: bool) -> None:
    """The `step`-th change of a name fails, and if `lasting` all after it."""
    done = [0]

    def failing(change: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            done[0] += 1
            if done[0] == step or (lasting and done[0] > step):
                raise error
            change(*arguments, **options)

        return call

    patch.setattr(os, "replace", failing(os.replace))
    patch.setattr(Path, "unlink", failing(Path.unlink))


BEGUN, NAMED, REMOVED = 4, 4, 3
"""Changes of names of an export of three files: drafts of files and index, then both, then the former files."""


@pytest.mark.parametrize("step", range(1, BEGUN + NAMED + REMOVED + 1))
def test_a_crash_while_files_get_their_names(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment the folder is one whole export; and the next one goes through."""
    in_three(tmp_path, 1.0)
    with monkeypatch.context() as patch:
        fails(patch, step, KeyboardInterrupt(), lasting=True)
        with pytest.raises(KeyboardInterrupt):
            in_three(tmp_path, 2.0)
    assert values(tmp_path) == dict.fromkeys("abc", 1.0 if step <= BEGUN + NAMED else 2.0)
    in_three(tmp_path, 3.0)
    assert values(tmp_path) == dict.fromkeys("abc", 3.0) and len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("step", range(1, BEGUN + NAMED + 1))
def test_names_that_the_system_refuses(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there is there as it was, and nothing else."""
    in_three(tmp_path, 1.0)
    before = written(tmp_path)
    with monkeypatch.context() as patch:
        fails(patch, step, OSError(5, "Input/output error"), lasting=False)
        with pytest.raises(CheckpointError, match="Input/output error"):
            in_three(tmp_path, 2.0)
    assert written(tmp_path) == before


def test_former_files_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new export is there, which is said; the next one removes them."""
    in_three(tmp_path, 1.0)
    with monkeypatch.context() as patch:
        fails(patch, BEGUN + NAMED + 2, OSError(5, "Input/output error"), lasting=False)
        with pytest.warns(UserWarning, match="the new export is in .*, whole"):
            in_three(tmp_path, 2.0)
    assert values(tmp_path) == dict.fromkeys("abc", 2.0) and len(os.listdir(tmp_path)) == 6
    in_three(tmp_path, 3.0)
    assert values(tmp_path) == dict.fromkeys("abc", 3.0) and len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("end", ["", ".unfinished"])
def test_a_folder_where_a_file_would_be(tmp_path: Path, end: str) -> None:
    """Refused, and nothing is lost."""
    in_three(tmp_path, 1.0)
    before = written(tmp_path)
    (tmp_path / f"model-00009-of-00009.safetensors{end}").mkdir()
    with pytest.raises(CheckpointError, match="model-00009-of-00009"):
        in_three(tmp_path, 2.0)
    (tmp_path / f"model-00009-of-00009.safetensors{end}").rmdir()
    assert written(tmp_path) == before


def test_a_draft_that_is_a_link(tmp_path: Path) -> None:
    """What it leads to is not written to."""
    (tmp_path / "precious").write_text("of somebody")
    (tmp_path / "model-00001-of-00003.safetensors.unfinished").symlink_to("precious")
    in_three(tmp_path, 1.0)
    assert (tmp_path / "precious").read_text() == "of somebody"


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("name", [f"{INDEX}.unfinished", LOCK])
def test_a_link_where_an_export_writes(tmp_path: Path, name: str, kind: str) -> None:
    """What it leads to is not written to; a lock that leads elsewhere is refused."""
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("of somebody")
    out.mkdir()
    (out / name).symlink_to(precious) if kind == "symbolic" else os.link(precious, out / name)
    if name == LOCK:
        with pytest.raises(CheckpointError, match="but an empty lock file of that name is needed"):
            in_three(out, 1.0)
    else:
        in_three(out, 1.0)
        assert values(out) == dict.fromkeys("abc", 1.0) and not (out / INDEX).is_symlink()
    assert precious.read_text() == "of somebody"


def test_a_save_beside_an_export(tmp_path: Path) -> None:
    """Neither goes where the other is, and both stay as they are."""
    exported, saved = tmp_path / "exported", tmp_path / "saved"
    module = nn.Linear(2, 2)
    smt.export(exported, module)
    smt.save_state(saved, module)
    before = {file.name for file in tmp_path.glob("*/*")}
    with pytest.raises(CheckpointError, match="exported has a model by `export`, which no later"):
        smt.save_state(exported, module)
    with pytest.raises(CheckpointError, match="which `export` did not write"):
        smt.export(saved, module)
    assert {file.name for file in tmp_path.glob("*/*")} == before


def test_nothing_to_export(tmp_path: Path) -> None:
    """It took the place of an earlier export, and left an index that nobody reads."""
    smt.export(tmp_path, {"w": torch.ones(2)})
    nothing: list[Any] = [torch.nn.Module(), {}]
    for source in nothing:
        with pytest.raises(
            CheckpointError, match=r"has 0 tensors, .*; give a module with parameters"
        ):
            smt.export(tmp_path, source)
    assert smt.open_checkpoint(tmp_path).shapes == {"w": ((2,), "float32")}


def test_a_folder_at_the_name_of_the_index_draft(tmp_path: Path) -> None:
    """Found before anything is written."""
    draft = tmp_path / f"{INDEX}.unfinished"
    draft.mkdir()
    with pytest.raises(CheckpointError, match="but exports write a file of that name"):
        in_three(tmp_path, 1.0)
    assert list(tmp_path.glob("*.safetensors*")) == [draft]


@pytest.mark.parametrize(
    "name",
    [
        INDEX,
        "model-00001-of-00001.safetensors",
        "model-00001-of-00003.safetensors.unfinished",
        LOCK,
    ],
)
@pytest.mark.timeout(60)
def test_a_pipe_in_the_folder(tmp_path: Path, name: str) -> None:
    """Refused; it is not waited for."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        in_three(tmp_path, 1.0)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("size", [1, 10_000_000], ids=["header", "data"])
def test_a_disk_that_is_full(tmp_path: Path, size: int) -> None:
    """No draft stays, also where to close it fails as to write to it did."""
    in_three(tmp_path, 1.0)
    before = written(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 if size == 1 else 3_000_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            smt.export(tmp_path, {"w": torch.ones(size)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert written(tmp_path) == before


@pytest.mark.parametrize("exports", [1, 2])
def test_a_load_while_another_export_ends(tmp_path: Path, exports: int) -> None:
    """Headers of one and data of another are never put together, even where both are of the same form."""
    in_three(tmp_path, 0.0)
    layouts = {name: sm.Layout((4,), sm.Mesh(), {}) for name in "abc"}
    opened, weights = smt.open_checkpoint(tmp_path), open_weights(str(tmp_path))
    for i in range(exports):
        in_three(tmp_path, i + 1.0)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.* cannot be read"):
        smt.load(opened, layouts)
    with pytest.raises(WeightsError, match="model-00001-of-00003"):
        load(weights, layouts, 0)


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what it was at the call, wherever the process goes meanwhile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    layouts, tensors = {"w": sm.Layout((4,), sm.Mesh(), {})}, {"w": torch.ones(4)}
    smt.export("out", tensors, layouts, progress=lambda *_: os.chdir(tmp_path / "below"))
    os.chdir(tmp_path)
    weights = open_weights("out")
    os.chdir(tmp_path / "below")
    assert load(weights, layouts, 0)["w"].equal(tensors["w"]) and os.listdir() == []


def test_a_folder_of_others_weights(tmp_path: Path) -> None:
    """Not replaced, and not mixed with: a model, an index, a checkpoint of ours, a name like an export's."""
    layouts, tensors = {"w": sm.Layout((2,), sm.Mesh(), {})}, {"w": torch.ones(2)}
    for name in (
        "model.safetensors",
        "model-00001-of-00001.safetensors",
        "consolidated.safetensors",
    ):
        folder = tmp_path / name[:-12]
        folder.mkdir()
        save_file(tensors, folder / name)
        before = written(folder)
        with pytest.raises(CheckpointError, match=f"has {name}, which `export` did not write"):
            smt.export(folder, tensors, layouts)
        assert written(folder) == before
    (tmp_path / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"index\.json that `export` did not write"):
        smt.export(tmp_path, tensors, layouts)
    smt.save(tmp_path / "ours", tensors, layouts)
    with pytest.raises(CheckpointError, match="which `export` did not write"):
        smt.export(tmp_path / "ours", tensors, layouts)


def test_two_exports_to_one_folder(tmp_path: Path) -> None:
    """The second is refused for as long as the first one lives; a lock of the dead is none."""
    layouts, tensors = {"w": sm.Layout((2,), sm.Mesh(), {})}, {"w": torch.ones(2)}
    with (
        hf_folder.locked(tmp_path),
        pytest.raises(CheckpointError, match=r"another export to .* is running"),
    ):
        smt.export(tmp_path, tensors, layouts)
    (tmp_path / f"{INDEX}.unfinished").write_text("of a process that is gone" * 100)
    (tmp_path / LOCK).touch()
    smt.export(tmp_path, tensors, layouts)
    assert by_vllms_rules(tmp_path)["w"].equal(torch.ones(2))


@pytest.mark.parametrize("closed", [False, True])
def test_a_draft_that_is_given_up_is_ones_own(tmp_path: Path, closed: bool) -> None:
    """A rank that has outlived its export leaves the next one's drafts alone.

    Where it has closed its own, the system may give the file's number to the next one, as ext4 does.
    """
    name, tensors = "model-00001-of-00001.safetensors", {"w": ((2,), "float32")}
    late = hf_folder.DraftFile(tmp_path, name, tensors, {})
    if closed:
        late.close()
    draft = hf_folder.DraftFile(tmp_path, name, tensors, {})
    draft.append(torch.ones(2), Tally(None))
    draft.close()
    hf_folder.discard([late])
    hf_folder.commit(tmp_path, {name: tensors}, {})
    assert by_vllms_rules(tmp_path)["w"].equal(torch.ones(2))


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 41}
    return LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_loads_it(tmp_path: Path, dtype: str) -> None:
    """Several files; the output layer is tied to the embedding, and said to be."""
    from transformers import AutoModelForCausalLM

    config = llama(tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    smt.export(tmp_path, model, max_shard_size="3KB")
    config.save_pretrained(tmp_path)
    found, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert found.state_dict().keys() == model.state_dict().keys()
    assert all(t.equal(model.state_dict()[name]) for name, t in found.state_dict().items())
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    with safe_open(tmp_path / index["weight_map"]["model.embed_tokens.weight"], "pt") as file:
        assert (
            file.metadata()["lm_head.weight"] == "model.embed_tokens.weight"
            and file.metadata()["format"] == "pt"
        )
    assert "lm_head.weight" not in index["weight_map"]


def test_transformers_loads_what_eight_ranks_export(pool: Pool, tmp_path: Path) -> None:
    """DTensors in uneven rows, and plain tensors."""
    from transformers import AutoModelForCausalLM

    config = llama(tie_word_embeddings=True)
    states = AutoModelForCausalLM.from_config(config).state_dict()
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    pool.run(
        work.exported_dtensors,
        str(tmp_path),
        {n: t for n, t in states.items() if n not in tied},
        tied,
    )
    config.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert found.keys() == states.keys() and all(t.equal(states[name]) for name, t in found.items())
    assert by_vllms_rules(tmp_path).keys() == states.keys() - tied.keys()


def test_modules_under_fsdp2(pool: Pool, tmp_path: Path) -> None:
    """A weight with two names is there once, the other name is said."""
    whole = pool.run(work.exported_by_fsdp2, str(tmp_path))[0]
    found = by_vllms_rules(tmp_path)
    assert found.keys() == whole.keys() - {"head.weight"} and all(
        t.equal(whole[name]) for name, t in found.items()
    )
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["tied"] == {
        "head.weight": "embed.weight"
    }


def test_sizes() -> None:
    assert [size_of(one) for one in (1, "5GB", "500 mb", "1.5KB", "5GiB")] == [
        1,
        5 * 10**9,
        5 * 10**8,
        1500,
        5 * 2**30,
    ]
    for wrong in (
        0,
        -1,
        True,
        "5",
        "",
        "GB",
        "infGB",
        "-1GB",
        "0KB",
        "1e3KB",
        1.5,
        "9" * 5000 + "GB",
    ):
        with pytest.raises(CheckpointError, match="give a number of bytes"):
            size_of(wrong)  # type: ignore[arg-type]


def test_files_are_filled_as_transformers_fills_them() -> None:
    """Beside huggingface_hub, on sizes of all kinds; names in the order of their numbers."""
    from huggingface_hub import split_state_dict_into_shards_factory

    for limit in (1, 3, 7, 10, 100):
        sizes = {f"w{i}": n for i, n in enumerate([3, 7, 0, 1, 12, 2, 2, 9, 10, 1, 0])}
        theirs = split_state_dict_into_shards_factory(
            sizes, get_storage_size=int, filename_pattern="m{suffix}", max_shard_size=limit
        ).filename_to_tensors.values()
        ours = split({name: ((n,), "uint8") for name, n in sizes.items()}, limit)
        assert [list(file) for file in ours] == list(theirs)
    names = [f"layers.{i}" for i in (0, 2, 10, 100)]
    assert [list(file) for file in split(dict.fromkeys(reversed(names), ((1,), "uint8")), 1)] == [
        [n] for n in names
    ]


WRONG: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any], str]] = {
    "a type": (
        lambda: (
            {"w": torch.ones(2, dtype=torch.complex128)},
            {"w": sm.Layout((2,), sm.Mesh(), {}, dtype="complex128")},
        ),
        {},
        r"complex128\[2\], a type that safetensors does not have",
    ),
    "a name": (lambda: ({"__metadata__": torch.ones(2)},), {}, "give it another name"),
    "no text": (lambda: ({"\ud800": torch.ones(2)},), {}, "give it another name"),
    "bytes": (
        lambda: ({"w": b"x"}, {"w": None}),
        {},
        "for bytes per rank, which safetensors cannot",
    ),
    "an object": (lambda: ({"w": [1]},), {}, "'w': a list; give only names"),
    "no mapping": (lambda: ([torch.ones(2)],), {}, "the model to export is a list"),
    "a shape": (
        lambda: ({"w": torch.ones(2)}, {"w": sm.Layout((3,), sm.Mesh(), {})}),
        {},
        r"\(2,\)",
    ),
    "a rank": (
        lambda: ({"w": torch.ones(2)}, {"w": sm.Layout((2,), sm.Mesh(dp=2), {})}),
        {},
        "the layout of tensor",
    ),
    "tied to nothing": (
        lambda: ({"w": torch.ones(2)},),
        {"tied": {"v": "u"}},
        "'u' is not an exported tensor",
    ),
    "tied and there": (
        lambda: ({"w": torch.ones(2)},),
        {"tied": {"w": "w"}},
        "'w' is the name of an exported tensor",
    ),
    **{
        f"a tie called {name}": (
            lambda: ({"w": torch.ones(2)}, {"w": sm.Layout((2,), sm.Mesh(), "n")}),
            {"tied": {name: "w"}},
            f"tied= has the name '{name}', but format, ",
        )
        for name in ("format", "shardmath_export", "DCP_SHARDING_INFO")
    },
    "a size": (
        lambda: ({"w": torch.ones(2)},),
        {"max_shard_size": "many"},
        "max_shard_size is 'many'",
    ),
    "an extra state": (lambda: (WithState(),), {}, "has the extra state"),
}


class WithState(nn.Module):
    """A module with bytes of its own."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Not needed."""


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_exported(tmp_path: Path, case: str) -> None:
    """Said before anything is written."""
    make, options, what = WRONG[case]
    with pytest.raises(sm.ShardError, match=what):
        smt.export(tmp_path / "out", *make(), **options)
    assert not (tmp_path / "out").exists()


def test_addends_are_not_exported(pool: Pool, tmp_path: Path) -> None:
    for kind, said in pool.run(work.export_addends, str(tmp_path / "out")):
        assert kind == "CheckpointError" and "is Partial" in said, said


@pytest.mark.parametrize("case", work.EXPORTS)
def test_one_rank_that_exports_something_odd(pool: Pool, tmp_path: Path, case: str) -> None:
    """Nobody waits for it."""
    for kind, said in pool.run(work.odd_export, str(tmp_path / "out"), case):
        assert kind == "CheckpointError" and work.EXPORTS[case][1] in said, said
    assert not (tmp_path / "out").exists()


def test_ranks_that_export_different_things(pool: Pool, tmp_path: Path) -> None:
    """An error on all."""
    errors = pool.run(work.attempted_export, str(tmp_path))
    assert all("call it with the same arguments on all ranks" in error[1] for error in errors)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        smt.export(tmp_path / "file" / "below", {"w": torch.ones(2)})


def test_headers_are_aligned(tmp_path: Path) -> None:
    """Tensors begin at multiples of their elements' size; what is written is told."""
    told: list[tuple[int, int]] = []
    smt.export(
        tmp_path,
        {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(1).half()},
        progress=lambda *numbers: told.append(numbers),
    )
    (file,) = tmp_path.glob("*.safetensors")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0 and told[-1] == (17, 17)
    starts = {name: header[name]["data_offsets"][0] for name in "abc"}
    assert starts == {"b": 0, "c": 12, "a": 14} and re.fullmatch(hf_folder.NAME, file.name)


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_ranks_that_export_other_tensors_under_one_name(
    pool: Pool, tmp_path: Path, what: str
) -> None:
    """Are told so before they ask each other where these lie."""
    for _, said in pool.run(work.differing_dtensors, str(tmp_path / "out"), what):
        assert "rank 3 could not export: 'w' is a DTensor of torch." in said
