"""What workers do with tensors that spmd_types has typed. Imported by workers, so no pytest here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardmath as sm
import shardmath_torch as smt

spmd: Any
try:
    import spmd_types as spmd
except ImportError:  # The tests that use it are skipped.
    spmd = None

MESH = sm.Mesh(dp=2, tp=4)
WHOLE = torch.arange(128.0).view(16, 8)
ORDERS = {"dp tp": ("dp", "tp"), "tp dp": ("tp", "dp")}
"""Which axis divides the rows of `w` first."""


class Typed(nn.Module):
    """Rows divided by both axes, columns by one, and a parameter that is whole; a buffer as the columns."""

    def __init__(self, mesh: DeviceMesh, order: str, rank: int) -> None:
        super().__init__()
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        groups = {"dp": dp, "tp": tp}
        rows = spmd.PartitionSpec(tuple(groups[axis] for axis in ORDERS[order]), None)
        self.w = nn.Parameter(own_part(f"({order} n) h", rank))
        self.c = nn.Parameter(own_part("h (tp n)", rank))
        self.register_buffer("b", own_part("h (tp n)", rank))
        self.bias = nn.Parameter(torch.ones(3))
        spmd.assert_type(self.w, {dp: spmd.V, tp: spmd.V}, partition_spec=rows)
        for columns in (self.c, self.b):
            spmd.assert_type(columns, {dp: spmd.R, tp: spmd.S(1)})
        spmd.assert_type(self.bias, {dp: spmd.R, tp: spmd.I})


def own_part(text: str, rank: int) -> Tensor:
    """The rank's part of WHOLE."""
    rows, columns = sm.Layout((16, 8), MESH, text).indices(rank)
    return WHOLE[torch.from_numpy(rows)][:, torch.from_numpy(columns)].clone()


def gather(module: Typed, mesh: DeviceMesh, order: str) -> Tensor:
    """The rows of all ranks by the package's own collectives, the innermost axis first."""
    whole: Any = module.w.detach()
    for axis in reversed(ORDERS[order]):
        whole = spmd.all_gather(whole, mesh.get_group(axis), src=spmd.S(0), dst=spmd.R)
    return whole


def kept(rank: int, folder: str) -> list[bool]:
    """Whether layouts are what the types say, and nothing is lost that is saved and loaded under other types."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    module = Typed(mesh, "dp tp", rank)
    layouts = smt.layout_of(module)
    found = [
        sm.equivalent(layouts["w"], sm.Layout((16, 8), MESH, "(dp tp n) h")),
        sm.equivalent(layouts["c"], sm.Layout((16, 8), MESH, "h (tp n)")),
        sm.equivalent(layouts["bias"], sm.Layout((3,), MESH, "n")),
        gather(module, mesh, "dp tp").equal(WHOLE),
    ]
    optimizer = torch.optim.AdamW(module.parameters())
    (module.w.square().sum() + module.c.sum() + module.bias.sum()).backward()
    optimizer.step()
    with torch.no_grad():
        module.w.copy_(own_part("(dp tp n) h", rank))
    smt.save_state(f"{folder}/state", module, optimizer)
    smt.export(f"{folder}/module", module)

    other = Typed(mesh, "tp dp", rank)
    for tensor in other.state_dict().values():
        tensor.zero_()
    fresh = torch.optim.AdamW(other.parameters())
    smt.load_state(f"{folder}/state", other, fresh)
    moment = fresh.state[other.w]["exp_avg"]
    wanted = own_part("(tp dp n) h", rank)
    found += [other.w.equal(wanted), other.b.equal(module.b), other.c.equal(module.c)]
    found += [torch.allclose(moment, wanted * 2 * (1 - 0.9))]
    found += [gather(other, mesh, "tp dp").equal(WHOLE)]
    return found


def refused(rank: int, case: str) -> str:
    """What is said of types that say no layout."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    module: Any = nn.Module()
    module.w = nn.Parameter(torch.zeros(5 if case == "uneven" and rank == 3 else 4, 4))
    types = {
        "an addend": {dp: spmd.R, tp: spmd.P},
        "no dimension": {dp: spmd.R, tp: spmd.V},
        "no axis": {tp: spmd.S(0)},
        "uneven": {dp: spmd.R, tp: spmd.S(0)},
    }
    spmd.assert_type(module.w, types[case])
    try:
        smt.layout_of(module)
    except sm.LayoutError as error:
        return str(error)
    finally:
        dist.barrier()
    return "nothing"
