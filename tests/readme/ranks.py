"""What `torchrun` does for a page's command, without importing torch in each rank: ranks are forked from a process that
has imported it already, and this process serves their store, which so outlives rank 0.

With the profile `deep` one page's go through torch's own, so what that sets is seen to be enough.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.pool import PRELOADED

START, NPROC = "--standalone", "--nproc-per-node"
"""The options that pages use: torchrun START NPROC count script argument ..."""


def _run_script(
    line: list[str], env: dict[str, str], folder: Path, files: tuple[Path, Path]
) -> None:
    """A rank's life: the script as `__main__`, printing into the files."""
    import torch

    gc.freeze()  # as a worker of a pool does
    torch.set_num_threads(1)  # the variable is read when torch is imported
    os.environ.update(env)
    os.chdir(folder)
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.argv = line
    sys.path[0] = str(folder)
    try:
        runpy.run_path(line[0], run_name="__main__")
    finally:
        sys.stdout.flush()


def run_ranks(
    rest: list[str], *, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `torchrun *rest` gives: all ranks' output, and 1 where a rank failed. Leaves no process behind."""
    from torch.distributed import TCPStore

    start, nproc, count, *line = rest
    assert (start, nproc) == (START, NPROC), f"pages start ranks with {START} {NPROC}: {rest}"
    files = cwd / "stdout", cwd / "stderr"
    for path in files:
        path.unlink(missing_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = env | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
    }
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [
        context.Process(
            target=_run_script,
            args=(line, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd, files),
            daemon=True,
        )
        for rank in range(int(count))
    ]
    for rank in ranks:
        rank.start()
    codes = _wait(ranks, time.monotonic() + timeout)
    out, err = (path.read_text() if path.exists() else "" for path in files)
    return subprocess.CompletedProcess(rest, int(any(codes)), out, f"{err}\nexit codes {codes}")


def _wait(ranks: list[mp.process.BaseProcess], deadline: float) -> list[int | None]:
    """The exit codes of all ranks; those that are left when one fails, or at the deadline, are killed."""
    failed = False
    while any(rank.is_alive() for rank in ranks) and not failed and time.monotonic() < deadline:
        time.sleep(0.02)
        failed = any(rank.exitcode for rank in ranks)
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]
