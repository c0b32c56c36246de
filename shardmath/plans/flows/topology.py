"""Topology: which ranks share a node, and how fast bytes leave and enter a rank.

1. Node k has the ranks k * ranks_per_node up to (k + 1) * ranks_per_node - 1.
2. Rates are bytes per second, per rank and per direction: `intra` to a rank of the same node
   (NVLink), `inter` to one of another node (one NIC per GPU). A rank sends and receives at full
   rate at once.
3. `latency_s` is the cost of one message in addition to its bytes, in seconds.
4. A topology is a value: equal numbers are equal topologies, whatever their names (H100 == H200,
   which have the same links), and its repr, which enters a plan's digest, is the same on every machine.

>>> Topology(ranks_per_node=4).nodes([1, 9, 3, 8])
{0: (1, 3), 2: (8, 9)}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsFloat

from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import PlanError
from shardmath.base.public import public

__all__ = ["H100", "H200", "Topology", "checked"]


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A description of a cluster: nodes of `ranks_per_node` ranks, speeds within and between nodes, and a latency per
    message. Speeds are per rank: all ranks of a node together take in `ranks_per_node` times as much.

    The default rates are the hardware's. Software reaches less; measure the rates of your cluster.
    Raises PlanError unless all are from 1e-18 to 1e18; `latency_s` may be 0.
    """

    ranks_per_node: int = 8
    intra_bytes_per_s: float = 450e9
    inter_bytes_per_s: float = 50e9
    latency_s: float = 1e-5

    def __post_init__(self) -> None:
        count = as_integer(self.ranks_per_node, "ranks_per_node", PlanError)
        if not 1 <= count <= MOST_RANKS:
            what = f"ranks_per_node is {count}"
            raise PlanError(f"{what}; give at least one rank, and at most {MOST_RANKS}")
        object.__setattr__(self, "ranks_per_node", count)
        for name in ("intra_bytes_per_s", "inter_bytes_per_s", "latency_s"):
            number = _check_number(name, getattr(self, name), zero=name == "latency_s")
            object.__setattr__(self, name, number)

    def node(self, rank: int) -> int:
        """Return the number of the node that `rank` is on.

        Raises PlanError unless the rank is a non-negative integer.
        """
        number = as_integer(rank, "a rank", PlanError)
        if number < 0:
            raise PlanError(f"rank {number} is negative; number ranks from 0")
        return number // self.ranks_per_node

    def nodes(self, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return a dict from node number to a tuple of the `ranks` on that node; nodes without any of `ranks` are left
        out. Nodes and ranks are in ascending order."""
        given = listed(ranks, "ranks", PlanError)
        distinct = {as_integer(rank, "a rank", PlanError) for rank in given}
        by_node: dict[int, list[int]] = {}
        for rank in sorted(distinct):
            node = self.node(rank)
            members = by_node.setdefault(node, [])
            members.append(rank)
        return {node: tuple(members) for node, members in by_node.items()}


def checked(topology: object) -> Topology:
    """Return `topology` itself. Raises PlanError if it is not a Topology."""
    if not isinstance(topology, Topology):
        raise PlanError(
            f"topology={topology!r} is not a Topology; give shardmath.Topology(ranks_per_node=8)"
        )
    return topology


MOST_RANKS = 1 << 24
"""Most ranks of a node: as many as a mesh may have."""


def _check_number(name: str, value: object, *, zero: bool) -> float:
    """`value` as a float, so that 50e9 and 50_000_000_000 are one topology, and -0.0 is 0.0. Raises PlanError for
    values that are not numbers, and for numbers that are not a rate or a duration."""
    kind = type(value).__name__
    # numpy's booleans and complex numbers convert to float as well.
    if (
        isinstance(value, bool | str)
        or not isinstance(value, SupportsFloat)
        or kind.startswith(("bool", "complex"))
    ):
        raise PlanError(f"{name} is {value!r}; give a number, such as 50e9")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise PlanError(f"{name} is {value!r}; give a number up to {MOST}") from None
    least = 0 if zero else LEAST
    if not least <= number <= MOST:
        raise PlanError(f"{name} is {value!r}; give a number from {least} to {MOST}")
    return number + 0.0


LEAST, MOST = 1e-18, 1e18
"""Bytes per second and seconds: times of any plan, and their ratios, are finite and not 0."""


H100 = Topology()
"""DGX H100: 8 GPUs, NVLink 4 at 450 GB/s per direction, one ConnectX-7 NIC of 400 Gb/s per GPU.

From NVIDIA's data sheet.
"""

H200 = Topology()
"""DGX H200: an equal value, since it has the links of H100; the GPUs differ in memory."""
