"""Refit: the command end to end on a tiny model, its bounds as laws, and every way it can fail, said once."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardmath import Layout, Mesh, ShardError, plan
from shardmath.models.systems.rules import parse
from shardmath_torch.checkpoints.safetensors.slices import load
from shardmath_torch.checkpoints.safetensors.weights import open_weights
from shardmath_torch.commands.command_line import run_command
from shardmath_torch.commands.refit import DEMO_DST, DEMO_SRC, command
from shardmath_torch.commands.refit_bounds import find_bounds
from shardmath_torch.commands.refit_out import check_out, finish, undo, write_draft
from shardmath_torch.commands.refit_report import TextTable

STORED = Path(__file__).parents[2] / "vectors" / "command_json"

SRC = "dp=2 tp=2: column (tp dp n) ...; row (dp n) (tp h); vocab (tp dp n) h; * (dp n) ..."
DST = "tp=3 ranks=3:6: column (tp n) ...; row n (tp h); vocab (tp n) h"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Sizes that do not divide, several types, a scalar and an empty tensor."""
    numbers = torch.arange(7 * 11, dtype=torch.int64)
    tensors = {
        "embed_tokens.weight": torch.randn(13, 6).to(torch.bfloat16),
        "layers.0.q_proj.weight": torch.randn(10, 6),
        "layers.0.q_proj.bias": torch.randn(10).half(),
        "layers.0.o_proj.weight": torch.randn(6, 10).to(torch.float8_e4m3fn),
        "layers.0.norm.weight": torch.tensor([1.0, float("nan"), -0.0]),
        "positions": numbers.view(7, 11),
        "scale": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def shardmath(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "shardmath", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)


# What arrived


@pytest.mark.parametrize(
    "name", ["rank0.safetensors", "rank0.safetensors.unfinished", "rank9.safetensors"]
)
def test_a_folder_where_a_rank_would_write(model: Path, tmp_path: Path, name: str) -> None:
    """Refused before anything starts; a rank that comes upon one says so."""
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(ShardError, match=f"{name} is a folder"):
        check_out(tmp_path / "out", open_weights(model))
    if name == "rank0.safetensors.unfinished":
        with pytest.raises(ShardError, match="cannot be written"):
            write_draft(tmp_path / "out", 0, {"w": torch.ones(2)})
    undo(tmp_path / "out", [0])


def test_a_draft_that_is_a_link(tmp_path: Path) -> None:
    """What it leads to is not written to."""
    (tmp_path / "precious").write_text("of somebody")
    (tmp_path / "rank0.safetensors.unfinished").symlink_to("precious")
    write_draft(tmp_path, 0, {"w": torch.ones(2)})
    assert (tmp_path / "precious").read_text() == "of somebody"


# The command


def test_one_refit_to_a_folder_at_a_time(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is an error from before its first process until the first one's files have their names."""
    out, job = tmp_path / "out", [str(model), "--src", "tp=1", "--dst", "tp=2"]
    codes: list[int] = []

    def meanwhile(*_: object, **__: object) -> list[object]:
        for rank in (1, 2):
            write_draft(out, rank, {"w": torch.full((3,), float(len(codes)))})
        if not codes:
            codes.append(1)
            codes.append(command([*job, "--out", str(out)]))
        return []

    monkeypatch.setattr("shardmath_torch.commands.refit.run", meanwhile)
    monkeypatch.setattr("shardmath_torch.commands.refit._show_result", lambda *_: None)
    assert command([*job, "--out", str(out)]) == 0
    assert codes == [1, 1]
    assert f"refit: another refit to {out} is running" in capsys.readouterr().err
    assert {file.name for file in out.iterdir()} == {"rank1.safetensors", "rank2.safetensors"}
    assert {float(load_file(file)["w"][0]) for file in out.iterdir()} == {0.0}
    assert command([*job, "--out", str(out)]) == 0


@pytest.mark.slow
def test_refits_at_once_of_two_models(tmp_path: Path) -> None:
    """What is there is of one, and of one that ended well."""
    lines = []
    for value in (1.0, 2.0):
        folder = tmp_path / str(value)
        folder.mkdir()
        save_file({"w": torch.full((6, 4), value)}, folder / "model.safetensors")
        sides = ["--src", "tp=1", "--dst", "tp=2", "--steps", "1", "--out", str(tmp_path / "out")]
        lines.append([sys.executable, "-m", "shardmath", "refit", str(folder), *sides])
    each = [
        subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for line in lines
    ]
    said = [one.communicate(timeout=100)[1].decode() for one in each]
    well = [value for value, one in zip((1.0, 2.0), each, strict=True) if one.returncode == 0]
    files = list((tmp_path / "out").iterdir())
    found = {float(load_file(file)["w"][0, 0]) for file in files}
    assert len(files) == 2 and len(found) == 1 and found <= set(well), said
    assert len(well) == 2 or "another refit to" in "".join(said), said


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.timeout(60)
def test_what_is_no_lock(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Neither followed nor waited for."""
    out = tmp_path / "out"
    out.mkdir()
    lock = out / ".shardmath-refit.lock"
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(tmp_path / "elsewhere")
    assert command([str(model), "--src", "tp=1", "--dst", "tp=2", "--out", str(out)]) == 1
    assert "but an empty lock file of that name is needed" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_end_to_end_on_overlapping_sides(model: Path, tmp_path: Path) -> None:
    """Rank 3 is on both sides; every rank leaves what it received, and nothing of an earlier refit stays."""
    out = tmp_path / "out"
    out.mkdir()
    for name in (
        "rank3.safetensors",
        "rank9.safetensors",
        "rank9.safetensors.unfinished",
        "notes.safetensors",
    ):
        (out / name).write_text("of another")
    done = shardmath(
        "refit",
        model,
        "--src",
        SRC,
        "--dst",
        DST,
        "--steps",
        "2",
        "--max-inflight",
        "64B",
        "--out",
        out,
    )
    assert (done.returncode, done.stderr) == (0, "")
    kept = ["notes.safetensors", *(f"rank{rank}.safetensors" for rank in (3, 4, 5))]
    assert sorted(file.name for file in out.iterdir()) == kept
    weights, side = open_weights(model), parse(DST)
    for rank in side.mesh.ranks:
        expected, found = (
            load(weights, side.layouts(weights.shapes), rank),
            load_file(out / f"rank{rank}.safetensors"),
        )
        assert {n: raw(t) for n, t in found.items()} == {n: raw(t) for n, t in expected.items()}
    for said in (
        "(tp dp n) ...",
        "embed_tokens.weight bfloat16[13, 6]",
        "transfers of 8 tensors",
        "compile (",
        "move (",
    ):
        assert said in done.stdout
    assert re.search(r"all \d+ bytes on ranks 3, 4, 5 equal .*model.safetensors", done.stdout)
    assert re.search(r"isend/irecv +[\d.]+ ms +[\d.]+ ms", done.stdout)


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


AO_WARNING = re.compile(r"^Failed to load .*/torchao/|<enum '\w+'> is an Enum subclass")


@pytest.mark.slow
def test_json(model: Path, tmp_path: Path) -> None:
    """One object on stdout, whose bytes are the plan's; progress on stderr."""
    done = shardmath("refit", model, "--src", SRC, "--dst", DST, "--steps", "1", "--json")
    assert done.returncode == 0 and "[" in done.stderr
    facts = json.loads(done.stdout)
    keys = set(json.loads((STORED / "refit_keys.json").read_text()))
    assert set(list_keys(facts)) == keys
    src, dst = parse(SRC), parse(DST)
    shapes = open_weights(model).shapes
    planned = plan(src.layouts(shapes), dst.layouts(shapes))
    assert facts["digest"] == planned.digest and facts["tensors"] == len(shapes)
    assert {each["rank"]: each["sent"] for each in facts["ranks"]} == planned.sent_bytes()
    assert {each["rank"]: each["received"] for each in facts["ranks"]} == planned.received_bytes()
    failed = shardmath("refit", tmp_path / "none", "--src", SRC, "--dst", DST, "--json")
    assert failed.returncode == 1 and json.loads(failed.stdout)["schema"] == "shardmath.error/1"


def list_keys(facts: object, path: str = "") -> Iterator[str]:
    """The keys of the objects in a value of JSON, each below those that it is in."""
    if isinstance(facts, dict):
        for key, value in facts.items():
            yield f"{path}.{key}"
            yield from list_keys(value, f"{path}.{key}")
    if isinstance(facts, list):
        for value in facts:
            yield from list_keys(value, f"{path}[]")


def test_the_demo() -> None:
    done = shardmath("refit", "--demo", "--steps", "1")
    # transformers imports torchao where it is installed, which warns that it finds no CUDA.
    said = [line for line in done.stderr.splitlines() if not AO_WARNING.search(line)]
    assert (done.returncode, said) == (0, [])
    assert (
        "embeddings of the arrived weights equal the original model's, bit for bit" in done.stdout
    )


def test_the_demo_s_rules_divide_attention_and_ffn() -> None:
    names = {
        "embeddings.word_embeddings.weight": (30522, 384),
        "encoder.layer.0.attention.self.query.bias": (384,),
        "encoder.layer.0.attention.output.dense.weight": (384, 384),
        "encoder.layer.0.attention.output.dense.bias": (384,),
        "encoder.layer.0.intermediate.dense.weight": (1536, 384),
    }
    shapes = {name: (shape, "float32") for name, shape in names.items()}
    src, dst = (parse(text).layouts(shapes) for text in (DEMO_SRC, DEMO_DST))
    assert [src[name].local_shape(1) for name in names] == [
        (7631, 384),
        (96,),
        (192, 192),
        (192,),
        (384, 384),
    ]
    assert [dst[name].local_shape(3) for name in names] == [
        (7629, 384),
        (96,),
        (384, 96),
        (384,),
        (384, 384),
    ]


# Bad input: found before a process starts, said once, status 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["--src", "tp=2: colunm (tp n) ...", "--dst", "tp=2"],
            r"'colunm' matches no tensor of 8.*\n.*\n +\^\ndid you mean 'column'",
        ),
        (
            ["--src", "tp=2: * (tp n) h", "--dst", "tp=2"],
            r"does not fit tensor 'layers.0.norm.weight' of shape \(3,\)",
        ),
        (["--src", "tp=2", "--dst", "tp=2: * (tp n"], r"expected '\)'"),
        (["--src", "tp=2", "--dst", "tp=2 ranks=3:5"], "rank 2 is in neither mesh"),
        (["--src", "tp=2", "--dst", "tp=64"], "66 ranks, above the limit of 64"),
        (
            ["--src", "dp=2 tp=2: * ... {sum: dp}", "--dst", "tp=2"],
            "is Partial .* a file holds whole values",
        ),
    ],
)
def test_bad_requests(
    model: Path, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([str(model), *arguments]) == 1
    error = capsys.readouterr().err
    assert re.search(what, error)
    assert error.startswith("refit: ")
    assert "Traceback" not in error


@pytest.mark.parametrize("link", ["the same", "symbolic", "hard", "folder", "stale"])
def test_what_would_replace_its_own_input(
    model: Path,
    tmp_path: Path,
    link: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said before a process starts, and by whatever name the file goes; also a file that would be removed."""
    monkeypatch.setattr(
        "shardmath_torch.commands.refit.run", lambda *_, **__: pytest.fail("a process would start")
    )
    file, out = model / "model.safetensors", tmp_path / "out"
    out.mkdir()
    target = out / ("rank70.safetensors" if link == "stale" else "rank2.safetensors")
    if link == "symbolic":
        target.symlink_to(file)
    elif link == "hard":
        os.link(file, target)
    else:
        shutil.move(file, target)
    given = target if link in ("the same", "folder", "stale") else file
    if link == "folder":
        (tmp_path / "other").symlink_to(out, target_is_directory=True)
        out = tmp_path / "other"
    before = given.read_bytes()
    assert command([str(given), "--src", "tp=2", "--dst", "tp=2", "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert (
        f"{target.name} is {given}, a file of the model, and would be replaced or removed" in error
    )
    assert given.read_bytes() == before and open_weights(given)


def test_an_out_that_is_no_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert (
        command([str(model), "--src", "tp=2", "--dst", "tp=2", "--out", str(tmp_path / "file")])
        == 1
    )
    assert "give a folder that can be written" in capsys.readouterr().err


def test_a_refit_that_fails_leaves_what_was_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def run(*_: object, **__: object) -> None:
        write_draft(out, 2, {"w": torch.ones(1)})
        raise ShardError("rank 3 ended")

    monkeypatch.setattr("shardmath_torch.commands.refit.run", run)
    out.mkdir()
    (out / "rank2.safetensors").write_text("of another")
    assert command([str(model), "--src", "tp=2", "--dst", "tp=2", "--out", str(out)]) == 1
    assert "rank 3 ended" in capsys.readouterr().err
    assert {file.name: file.read_text() for file in out.iterdir()} == {
        "rank2.safetensors": "of another"
    }


def test_a_refit_that_is_interrupted_between_two_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are missing, none is of the refit before, and it is said."""
    real, calls = os.replace, itertools.count()

    def refit(value: float) -> int:
        for rank in (0, 1):
            write_draft(tmp_path, rank, {"w": torch.full((2,), value)})
        return run_command("refit", lambda: finish(tmp_path, (0, 1)))

    def replace(*arguments: Path) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        real(*arguments)

    assert refit(1.0) == 0
    monkeypatch.setattr(os, "replace", replace)
    assert refit(2.0) == 130
    said = capsys.readouterr().err
    assert (
        f"refit: interrupted; --out {tmp_path}: some files of this refit are missing there" in said
    )
    found = {file.name: load_file(file)["w"].tolist() for file in tmp_path.glob("*.safetensors")}
    assert found == {"rank0.safetensors": [2.0, 2.0]}
    assert refit(3.0) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"rank0.safetensors", "rank1.safetensors"}


def test_a_file_cut_short(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 5)
    assert command([str(model), "--src", "tp=2", "--dst", "tp=2"]) == 1
    assert "is cut short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "give MODEL_DIR, --src and --dst, or --demo"),
        (["m", "--src", "tp=2"], "give MODEL_DIR, --src and --dst, or --demo"),
        (["--demo", "--steps", "0"], "'0' is not a number of 1 or more"),
        (["--demo", "--steps", "²"], "'²' is not a number of 1 or more"),
        (["--demo", "--timeout", "soon"], "'soon' is not a time in seconds"),
        (["--demo", "--timeout", "9" * 15], "is not a time in seconds"),
        (["--demo", "--max-inflight", "1 mile"], "'1 mile' is not a size"),
    ],
)
def test_usage(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 2
    assert what in capsys.readouterr().err


# Processes: failures are raised once, and nothing is left behind

TASKS = r"""
    import os, signal, sys, time
    import torch.distributed as dist
    from shardmath import ShardError
    from shardmath_torch.commands import processes

    processes.PATIENCE = 0.5

    def task(how, rank, report):
        report("work", 0, 1)
        os.write(2, f"{os.getpid()}\n".encode())
        if how == "sleep" or (how == "silent" and rank == 1):
            time.sleep(100)
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "ours":
            raise ShardError("tensor 'w' is short; load it again")
        if rank == 1 and how == "other":
            1 / 0
        dist.barrier()
        return rank * rank

    if __name__ == "__main__":
        for how in sys.argv[1:]:
            try:
                print(how, processes.run(task, how, 3, timeout=2.0 if how == "silent" else 20.0))
            except ShardError as error:
                lines = str(error).splitlines()
                print(how, lines[0], "...", lines[-1])
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.py"
    file.write_text(textwrap.dedent(TASKS))
    return file


def test_failures_of_ranks(tasks: Path) -> None:
    """Right, ours, another's, killed, silent, right again: each in one go, told apart, within its time."""
    hows = ["right", "ours", "other", "killed", "silent", "right"]
    line = [sys.executable, str(tasks), *hows]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    right, ours, other, killed, silent, again = done.stdout.splitlines()
    assert right == again == "right [0, 1, 4]"
    assert ours.startswith("ours tensor 'w' is short; load it again ...")
    assert other.startswith(
        "other rank 1 failed: ZeroDivisionError: division by zero; its traceback: ..."
    )
    assert other.endswith("... ZeroDivisionError: division by zero")
    assert killed.startswith(
        "killed rank 1 ended with signal SIGKILL in phase 'work', without reporting an error; it may have run"
    )
    assert silent.startswith(
        "silent rank 1 stalled in phase 'work' until the others gave up (rank "
    )
    pids = [int(pid) for pid in re.findall(r"^\d+$", done.stderr, re.MULTILINE)]
    assert len(pids) == 3 * len(hows)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_leave_with_their_parent(tasks: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(tasks), "sleep"], stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stderr is not None
        pids = [int(parent.stderr.readline()) for _ in range(3)]
        assert all(alive(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


# Bounds: laws over the rules' notation

TEXTS = (
    "n h",
    "(tp n) h",
    "(dp n) h",
    "(tp dp n) h",
    "(dp n) (tp h)",
    "(4 dp n | tp n) h",
    "(n tp 2) h",
    "n (tp~ h)",
)
sides = st.tuples(
    st.sampled_from(TEXTS), st.sampled_from([(2, 2), (1, 3), (3, 1)]), st.permutations(range(6))
)


@given(sides, sides, st.tuples(st.integers(0, 13), st.integers(1, 7)))
@settings(max_examples=200, deadline=None)
def test_bounds_hold_for_every_plan(a: tuple, b: tuple, shape: tuple[int, int]) -> None:  # type: ignore[type-arg]
    """Received bytes are the bound; sent bytes are never below theirs, for a rank and for the busiest."""
    src, dst = ({"w": layout(side, shape)} for side in (a, b))
    made, bound = plan(src, dst), find_bounds(src, dst)
    sent = made.sent_bytes()
    assert bound.received == made.received_bytes()
    assert all(sent[rank] >= bound.sent[rank] for rank in sent)
    assert max(sent.values()) >= bound.busiest
    assert sum(bound.received.values()) <= bound.busiest * len(src["w"].mesh.ranks)


def layout(side: tuple[str, tuple[int, int], list[int]], shape: tuple[int, int]) -> Layout:
    text, (dp, tp), ranks = side
    return Layout(shape, Mesh(dp=dp, tp=tp, ranks=ranks[: dp * tp]), text)


def test_bound_of_replicas() -> None:
    """Ranks 0 and 1 alone hold rows 0:4, which two receivers want: each sends at least one receiver's worth."""
    src = {"w": Layout((8,), Mesh(dp=2, tp=2, ranks=(0, 2, 1, 3)), "(tp n)")}
    dst = {"w": Layout((8,), Mesh(tp=2, ranks=(4, 5)), "n")}
    bound = find_bounds(src, dst)
    assert bound.received == {0: 0, 1: 0, 2: 0, 3: 0, 4: 32, 5: 32}
    assert bound.sent == dict.fromkeys(range(6), 0)
    assert (bound.busiest, bound.forced_by) == (16, frozenset({0, 1, 2, 3}))


def test_bound_of_pairs() -> None:
    """Each two of three ranks hold 12 bytes that rank 3 wants: no single pair forces what all three together do."""
    src = {}
    for name, ranks in (("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2))):
        src[name] = Layout((3,), Mesh(dp=2, ranks=ranks), "n")
    dst = {name: Layout((3,), Mesh(dp=1, ranks=(3,)), "n") for name in src}
    bound = find_bounds(src, dst)
    assert (bound.busiest, bound.forced_by) == (12, frozenset({0, 1, 2}))
    assert max(plan(src, dst).sent_bytes().values()) == 12


def test_bound_of_nothing() -> None:
    """Where every rank has what it needs, nobody is forced to send."""
    held = {"w": Layout((8,), Mesh(tp=2), "(tp n)")}
    bound = find_bounds(held, held)
    assert (bound.busiest, bound.sent, bound.received) == (0, {0: 0, 1: 0}, {0: 0, 1: 0})


# What it prints


def test_tables_align() -> None:
    table = TextTable("Title", ("name", "n"), (("a", "5"), ("bcd", "12")))
    assert str(table) == "Title\n  name   n\n  ----  --\n  a      5\n  bcd   12"
