"""What lies in a checkpoint's folder: bits that flip, saves at once, what saves leave, and folders that are URLs."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moto.server import ThreadedMotoServer

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints import checkpoint, reading, verifying, writing
from shardmath_torch.checkpoints.commits import Claim, claim, find_counting, make_count, withdraw
from shardmath_torch.checkpoints.files import checksums, locks
from shardmath_torch.checkpoints.files.places import CheckpointError, Remote, place
from tests.distributed import pool as workers
from tests.distributed.pool import Pool
from tests.distributed.tasks import checkpoints as work
from tests.distributed.tasks.cases import thinned

workers.PRELOADED.append("s3fs")

DP = sm.Mesh(dp=4, tp=2)
LINE = sm.Layout((6,), sm.Mesh(), {})
PLANE = sm.Layout((13, 6), sm.Mesh(), {})


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of a few bytes have several checksums."""
    for module in (checksums, reading, verifying):
        monkeypatch.setattr(module, "CHUNK", 64)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (zlib.compress(bytes(1 << 26)), "rank 1 sent 3 bytes of flags .* of 9 chunks needs 2"),
        (zlib.compress(b"a"), "rank 1 sent 1 bytes of flags .* of 9 chunks needs 2"),
        (b"marks", "the chunks that rank 1 reads cannot be unpacked"),
    ],
)
def test_marks_of_another_checkpoint(said: bytes, what: str) -> None:
    """64 MiB of them were unpacked, short ones filled up, and torn ones were zlib's own error."""
    own = verifying.pack_marks(np.ones(9, bool))
    with pytest.raises(CheckpointError, match=what):
        verifying.take_share([own, said], 0, 9)


# Bits that flip


def flipped(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


STATE = {"w": work.elements((13, 6), "float32"), "v": torch.arange(6.0), "x": b"own bytes"}
LAYOUTS: dict[str, Any] = {"w": PLANE, "v": LINE, "x": None}


def loaded(path: Path, layouts: dict[str, Any] = LAYOUTS) -> dict[str, bytes]:
    return {name: t.contiguous().numpy().tobytes() for name, t in smt.load(path, layouts).items()}


def test_a_bit_that_flips_anywhere_is_an_error_or_makes_no_difference(tmp_path: Path) -> None:
    """In the data, headers, `.metadata`, its seal, and the copy of the index."""
    smt.save(tmp_path, STATE, LAYOUTS)
    right, numbers = loaded(tmp_path), random.Random(7)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        ends = [*range(64), *range(8 * len(whole) - 8 * 90, 8 * len(whole))]
        errors = 0
        near = ends if file.name == ".metadata" else ends[::9]
        for bit in [*numbers.sample(range(8 * len(whole)), 250), *thinned(near)]:
            flipped(file, bit)
            try:
                assert loaded(tmp_path) == right, (file.name, bit)
            except CheckpointError:
                errors += 1
            file.write_bytes(whole)
        assert errors > 0, file.name
    assert loaded(tmp_path) == right


def test_a_flip_in_any_byte_of_data_is_an_error(tmp_path: Path, small_chunks: None) -> None:
    """Whichever chunk it is in, also the last, shorter one; and without checksums it is not."""
    smt.save(tmp_path, STATE, LAYOUTS)
    (piece,) = smt.open_checkpoint(tmp_path)["w"].pieces
    assert len(piece.sums) == 16 * 5 and isinstance(piece.file, Path)
    # The last one is of the last chunk.
    for byte in {*thinned(range(piece.start, piece.stop)), piece.stop - 1}:
        flipped(piece.file, 8 * byte + byte % 8)
        with pytest.raises(
            CheckpointError, match=r"bytes \d+ to \d+ do not have the checksum [0-9a-f]{16} "
        ):
            smt.load(tmp_path, {"w": PLANE})
        assert smt.load(tmp_path, {"v": LINE})["v"].equal(STATE["v"])
        flipped(piece.file, 8 * byte + byte % 8)
    flipped(piece.file, 8 * piece.start)
    assert not smt.load(tmp_path, {"w": PLANE}, verify=False)["w"].equal(STATE["w"])


def test_ranks_find_a_flip_that_any_of_them_would_read(pool: Pool, tmp_path: Path) -> None:
    """Each byte is checked by one; the error is everybody's. Whoever reads other bytes does not look there."""
    layouts = {"w": sm.Layout((64, 6), DP, "(dp tp n) h"), "v": sm.Layout((64, 6), DP, "n h")}
    pool.run(work.saved, str(tmp_path), layouts)
    piece = smt.open_checkpoint(tmp_path)["w"].pieces[5]
    assert isinstance(piece.file, Path)
    flipped(piece.file, 8 * (piece.start + 3))
    for text in ("(dp tp n) h", "n h", "n (dp tp h)", "(tp n) h"):
        answers = pool.run(
            work.attempted, "load", str(tmp_path), {"w": sm.Layout((64, 6), DP, text)}
        )
        assert all(
            kind == "CheckpointError" and "do not have the checksum" in said
            for kind, said in answers
        ), answers
    assert (
        pool.run(work.loaded, str(tmp_path), {"v": sm.Layout((64, 6), DP, "(tp dp n) h")})
        == [[]] * 8
    )


def test_an_index_alone_is_proved_too(tmp_path: Path) -> None:
    """Where there is no `.metadata`."""
    smt.save(tmp_path, STATE, LAYOUTS)
    right, numbers = loaded(tmp_path), random.Random(8)
    (tmp_path / ".metadata").unlink()
    assert loaded(tmp_path) == right
    index = tmp_path / "shardmath.json"
    whole = index.read_bytes()
    for bit in numbers.sample(range(8 * len(whole)), 200):
        flipped(index, bit)
        with pytest.raises(CheckpointError):
            loaded(tmp_path)
        index.write_bytes(whole)


def test_an_index_of_an_earlier_save_does_not_count(tmp_path: Path) -> None:
    """As a crash between the two leaves it."""
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    former = (tmp_path / "shardmath.json").read_bytes()
    smt.save(tmp_path, {"v": torch.arange(6.0)}, {"v": LINE})
    (tmp_path / "shardmath.json").write_bytes(former)
    assert smt.load(tmp_path, {"v": LINE})["v"].equal(torch.arange(6.0))


# Several saves


def saves(path: str, value: float, times: int, start: Any) -> None:
    """Saves some times, and ends with 3 for an error of ours."""
    start.wait()
    try:
        for _ in range(times):
            smt.save(path, {"v": torch.full((6,), value)}, {"v": LINE})
    except sm.ShardError:
        os._exit(3)
    os._exit(0)


def test_saves_at_once_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    """Both end well, and the folder holds the last, and nothing else."""
    context = mp.get_context("fork")
    start = context.Event()
    processes = [
        context.Process(target=saves, args=(str(tmp_path), float(i), 40, start)) for i in (1, 2)
    ]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert smt.load(tmp_path, {"v": LINE})["v"].unique().tolist() in ([1.0], [2.0])
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    assert len(work.files(str(tmp_path))) == 3


def test_a_save_between_another_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first clears away what it has replaced, and not the one that has replaced it since."""
    clear = checkpoint.Writer.clear

    def paused(self: Any, share: tuple[int, int] = (0, 1)) -> None:
        monkeypatch.setattr(checkpoint.Writer, "clear", clear)
        smt.save(tmp_path, {"v": torch.full((6,), 2.0)}, {"v": LINE})
        clear(self, share)

    monkeypatch.setattr(checkpoint.Writer, "clear", paused)
    smt.save(tmp_path, {"v": torch.full((6,), 1.0)}, {"v": LINE})
    assert smt.load(tmp_path, {"v": LINE})["v"].unique().tolist() == [2.0]
    assert len(work.files(str(tmp_path))) == 3


def test_the_copy_of_the_index_is_of_the_save_that_counts(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another save ends while this one is about to write its copy."""
    real, turns = writing._update_copy, iter([True])

    def paused(*args: Any) -> None:
        if next(turns, False):
            smt.save(url, {"v": torch.full((6,), 2.0)}, {"v": LINE})
        real(*args)

    monkeypatch.setattr(writing, "_update_copy", paused)
    smt.save(url, {"v": torch.ones(6)}, {"v": LINE})
    assert len(names_at(url)) == 3
    (place(url) / ".metadata").unlink()
    assert smt.load(url, {"v": LINE})["v"].unique().tolist() == [2.0]


def test_what_clears_a_copy_away_is_not_the_end_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save, that counts by now, takes the draft of this one's copy for what is left."""
    real, turns = os.replace, iter([False, False, True])

    def replace(*args: Any) -> None:
        if next(turns, False):
            smt.save(tmp_path, {"v": torch.full((6,), 2.0)}, {"v": LINE})
        real(*args)

    monkeypatch.setattr(os, "replace", replace)
    smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    (tmp_path / ".metadata").unlink()
    assert smt.load(tmp_path, {"v": LINE})["v"].unique().tolist() == [2.0]


def test_a_save_that_goes_on_keeps_its_files(tmp_path: Path) -> None:
    """Whatever others save meanwhile; when it has ended without an end, they go."""
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    held = claim(tmp_path, "0123456789ab")
    theirs = tmp_path / "shardmath-0123456789ab-00000-of-00001.safetensors"
    for name in (theirs, theirs.with_name(theirs.name + ".unfinished")):
        name.write_bytes(b"data")
    smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    assert len(work.files(str(tmp_path))) == 3 + 3
    assert held.handle is not None
    os.close(held.handle)
    smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    assert len(work.files(str(tmp_path))) == 3


def test_a_save_that_another_took_for_dead_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where locks do not reach: it fails, whenever the other ran, and the other's checkpoint is whole."""
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    for module, step in ((writing, "to_json"), (writing, "make_count"), (os, "replace")):
        real, turns = getattr(module, step), iter([True])

        def paused(*args: Any, real: Any = real, turns: Iterator[bool] = turns) -> Any:
            if next(turns, False):
                smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, step, paused)
            with pytest.raises(CheckpointError):
                smt.save(tmp_path, {"v": torch.full((6,), 2.0)}, {"v": LINE})
        assert smt.load(tmp_path, {"v": LINE})["v"].unique().tolist() == [1.0]
        assert len(work.files(str(tmp_path))) == 3


@pytest.mark.parametrize("step", ["_describe", "to_json", "make_count"])
def test_a_save_that_another_rank_gave_up_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """However long the rank that would make it count takes: others may have saved since."""
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    real = getattr(writing, step)

    def late(*args: Any) -> Any:
        draft = next(tmp_path.glob("shardmath-*.metadata.unfinished"))
        other = writing.Writer(tmp_path)
        other._save = draft.name.removeprefix("shardmath-")[:12]
        other.abandon()
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writing, step, late)
        with pytest.raises(CheckpointError, match="another rank failed and removed it"):
            smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    assert smt.load(tmp_path, {"v": LINE})["v"].equal(torch.zeros(6))
    assert len(work.files(str(tmp_path))) == 3


def test_a_draft_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    """Neither is one that another has put in its place."""
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    before = work.files(str(tmp_path))
    for instead in (False, True):
        held = claim(tmp_path, "0123456789ab")
        held.draft.unlink()
        if instead:
            held.draft.write_bytes(b"")
        with pytest.raises(
            CheckpointError, match="does not see its lock; what was saved there before"
        ):
            make_count(held, b"text")
        withdraw(held)
        assert work.files(str(tmp_path)) == before
    assert smt.load(tmp_path, {"v": LINE})["v"].equal(torch.zeros(6))


def test_a_draft_that_cannot_be_removed_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next save would take it for that of a save that is going on."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    held = claim(tmp_path, "0123456789ab")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        withdraw(held)
    assert held.draft.is_file()
    smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    assert len(work.files(str(tmp_path))) == 3


def test_a_save_that_is_interrupted_once_it_counts_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C left the file open for as long as the process ran."""

    def release(held: Claim) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    before = set(locks._held)
    monkeypatch.setattr(Claim, "release", release)
    with pytest.raises(KeyboardInterrupt):
        smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    assert locks._held == before
    assert smt.load(tmp_path, {"v": LINE})["v"].equal(torch.ones(6))


def test_every_save_removes_all_of_the_former(pool: Pool, tmp_path: Path) -> None:
    """Ranks list the folder while others remove files from it."""
    layouts = {"w": sm.Layout((64, 6), DP, "(dp tp n) h")}
    left = []
    for _ in range(12):
        pool.run(work.saved, str(tmp_path), layouts)
        left.append(len(work.files(str(tmp_path))) - 2 - 8)
    assert left == [0] * 12


def test_a_save_that_fails_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    """Also where one rank fails to write and the others have written."""
    layouts = {"w": sm.Layout((64, 6), DP, "(dp tp n) h")}
    pool.run(work.saved, str(tmp_path), layouts)
    before = work.files(str(tmp_path))
    answers = pool.run(work.disk_full, str(tmp_path), layouts, 3)
    assert all(kind == "CheckpointError" and "No space left" in said for kind, said in answers), (
        answers
    )
    assert work.files(str(tmp_path)) == before
    assert pool.run(work.loaded, str(tmp_path), layouts) == [[]] * 8


@pytest.mark.parametrize("turn", range(3))
def test_a_disk_that_is_full_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """When files are renamed, when `.metadata` is replaced, when the copy of the index is: what counts is whole."""
    smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
    real, calls = os.replace, iter(range(99))

    def replace(*args: Any, **kwargs: Any) -> None:
        if next(calls) == turn:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError, match="No space left") as error:
        smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
    monkeypatch.undo()
    counts = [1.0] if "the new save is whole" in str(error.value) else [0.0]
    assert (
        smt.load(tmp_path, {"v": LINE})["v"].unique().tolist()
        == counts
        == [[0.0], [0.0], [1.0]][turn]
    )
    assert turn == 2 or len(work.files(str(tmp_path))) == 3


def test_an_error_after_the_save_counts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever sync fails, the sentence is true."""
    real, said = os.fsync, set()
    for turn in range(4):
        smt.save(tmp_path, {"v": torch.zeros(6)}, {"v": LINE})
        former, calls = find_counting(tmp_path), iter(range(99))

        def fsync(handle: int, turn: int = turn, calls: Iterator[int] = calls) -> None:
            if next(calls) == turn:
                raise OSError(5, "Input/output error")
            real(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(CheckpointError, match="Input/output error") as error:
                smt.save(tmp_path, {"v": torch.ones(6)}, {"v": LINE})
        is_new = find_counting(tmp_path) != former
        assert ("the new save is whole" in str(error.value)) == is_new
        assert ("is as it was" in str(error.value)) != is_new
        assert smt.load(tmp_path, {"v": LINE})["v"].unique().tolist() == [float(is_new)]
        said.add(is_new)
    assert said == {False, True}


# URLs


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket of a server of S3 of our own."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in given.items():
            patch.setenv(key, value)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("checkpoints")
        yield "s3://checkpoints"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that does not exist, of each kind."""
    monkeypatch.chdir(tmp_path)
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}/folder"
    return (
        f"{request.param}://{'' if request.param == 'memory' else tmp_path}/{tmp_path.name}/folder"
    )


def names_at(url: str) -> list[str]:
    return sorted(file.name for file in place(url).iterdir())


def test_a_url_is_saved_to_and_loaded_from(url: str, tmp_path: Path, small_chunks: None) -> None:
    """Twice; of the former save nothing is left, and here no folder that is called like the URL."""
    smt.save(url, {"w": torch.zeros(13, 6), "x": b"abc"}, {"w": PLANE, "x": None})
    smt.save(url, STATE, LAYOUTS)
    assert len(names_at(url)) == 3
    found = smt.load(url, LAYOUTS)
    assert found["w"].equal(STATE["w"]) and bytes(found["x"].tolist()) == b"own bytes"
    assert smt.open_checkpoint(url).shapes["v"] == ((6,), "float32")
    columns = sm.Layout((13, 6), sm.Mesh(ranks=[0, 1], a=2), "n (a h)")
    assert smt.load(url, {"w": columns})["w"].equal(STATE["w"][:, :3])
    assert not any("memory" in name or "s3" in name for name in os.listdir(tmp_path))


def test_a_module_is_saved_to_a_url(url: str) -> None:
    torch.manual_seed(0)
    module, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    smt.save_state(url, module, optimizer)
    smt.load_state(url, other, torch.optim.AdamW(other.parameters()))
    assert other.weight.equal(module.weight)
    other.weight.data.zero_()
    smt.load_weights(url, other, names={name: f"model.{name}" for name in ("weight", "bias")})
    assert other.weight.equal(module.weight)


def test_what_torch_and_hugging_face_left_at_a_url(url: str, tmp_path: Path) -> None:
    """torch's own checkpoint, and safetensors with an index."""
    import fsspec
    from safetensors.torch import save
    from torch.distributed.checkpoint import save as by_torch

    here = tmp_path / "by-torch"
    by_torch({"v": torch.arange(6.0)}, checkpoint_id=here, no_dist=True)
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path, exist_ok=True)
    for file in here.iterdir():
        fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    assert smt.load(url, {"v": LINE})["v"].equal(torch.arange(6.0))
    fs.rm(path, recursive=True)
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/a.safetensors", save({"v": torch.arange(6.0) + 1}))
    fs.pipe_file(f"{path}/model.safetensors.index.json", b'{"weight_map": {"v": "a.safetensors"}}')
    assert smt.load(url, {"v": LINE})["v"].equal(torch.arange(6.0) + 1)


@pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)
def test_a_flip_in_an_object_is_found(url: str) -> None:
    import fsspec

    smt.save(url, STATE, LAYOUTS)
    piece = smt.open_checkpoint(url)["w"].pieces[0]
    fs, path = fsspec.core.url_to_fs(str(piece.file))
    data = bytearray(fs.cat_file(path))
    data[piece.start] ^= 4
    fs.pipe_file(path, bytes(data))
    with pytest.raises(CheckpointError, match="do not have the checksum"):
        smt.load(url, LAYOUTS)


@pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)
def test_a_save_to_a_url_that_fails_leaves_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the former one is whole."""
    smt.save(url, STATE, LAYOUTS)
    before, real = names_at(url), Remote.write_bytes

    def write_bytes(self: Remote, data: bytes) -> None:
        if self.name == ".metadata":
            raise OSError(5, "the service is gone")
        real(self, data)

    monkeypatch.setattr(Remote, "write_bytes", write_bytes)
    with pytest.raises(
        CheckpointError, match="the service is gone; what was saved there before is as it was"
    ):
        smt.save(url, {"v": torch.ones(6)}, {"v": LINE})
    monkeypatch.undo()
    assert names_at(url) == before and smt.load(url, LAYOUTS)["w"].equal(STATE["w"])


def test_ranks_save_to_a_url_together(pool: Pool, bucket: str) -> None:
    """Workers have an environment of their own."""
    layouts = {
        "w": sm.Layout((13, 6), DP, "(tp dp n) h"),
        "v": sm.Layout((64, 6), DP, "n (dp tp h)"),
    }
    given = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    other = {"w": sm.Layout((13, 6), DP, "n (dp h)"), "v": sm.Layout((64, 6), DP, "(tp dp n) h")}
    assert pool.run(work.at_url, f"{bucket}/together", given, layouts, other) == [[]] * 8
    assert len(names_at(f"{bucket}/together")) <= 2 + 16


def test_what_no_url_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that nobody serves, one that needs what is not installed, a URL that was made a Path, a chain that
    fsspec takes for a folder, what is no scheme, and an unset variable.
    """
    monkeypatch.chdir(tmp_path)
    for url, said in {
        "nobody://bucket/x": "served by nothing that is installed",
        "dropbox://bucket/x": "served by nothing that is installed",
        Path("s3://bucket/x"): "as a Path removes a slash",
        "s3:/bucket/x": "as a Path removes a slash",
        Path(" s3://bucket/x"): "as a Path removes a slash",
        Path("memory://"): "as a Path removes a slash",
        "file::memory://x": "but fsspec takes it for",
        "local::memory://x": "but fsspec takes it for",
        "file:///x::memory://y": "but fsspec takes it for",
        "my_store://bucket/x": "served by nothing that is installed",
        " s3://bucket/x": "is a URL whose scheme is ' s3', not",
        "_://x": "is a URL whose scheme is '_', not",
        "": "names no folder",
        " ": "names no folder",
        "file://": "names no folder",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            smt.save(url, {"v": torch.zeros(6)}, {"v": LINE})
        with pytest.raises(CheckpointError, match=said):
            smt.load(url, {"v": LINE})
        with pytest.raises(CheckpointError, match=said):
            smt.open_checkpoint(url)
    assert os.listdir(tmp_path) == []


def test_a_chain_of_urls_is_no_folder() -> None:
    assert isinstance(place("async_wrapper::memory://x"), Remote)
    assert place("file:///x") == Path("/x") == place("local:///x")


def test_nothing_at_a_url(url: str) -> None:
    with pytest.raises(sm.ShardError, match="does not exist"):
        smt.load(url, {"v": LINE})


def test_a_path_that_could_not_be_loaded_is_not_saved_to(tmp_path: Path) -> None:
    """torch maps files by names in UTF-8 only."""
    odd = tmp_path / "\u00e9\udcff"
    with pytest.raises(CheckpointError, match=r"\\udcff' is not UTF-8"):
        smt.save(odd, {"v": torch.zeros(6)}, {"v": LINE})
    assert os.listdir(tmp_path) == []


def test_what_is_written_to_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is not written to a folder that is called like a URL."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sm.ShardError, match="is a URL"):
        smt.export("memory://bucket/x", {"v": torch.zeros(6)}, {"v": LINE})
    assert os.listdir(tmp_path) == []
