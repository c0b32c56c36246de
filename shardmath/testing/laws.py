"""Laws: the laws of all values, each with the strategy of its arguments.

`LAWS` lists them; the laws of one placement are `PLACEMENT_LAWS` (see `placements`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st

from shardmath.testing.content_laws import (
    any_change_is_found,
    changes_are_the_difference,
    digest_is_its_definition,
    digest_survives_moves,
    replicas_are_compared,
    windows_have_the_digest,
)
from shardmath.testing.layout_laws import (
    compose_is_after,
    fast_is_definition,
    invert_undoes,
    mesh_transposition_changes_nothing,
    one_piece_needs_no_border,
    parse_print,
    relabeling_moves_holdings,
    runs_are_canonical,
    shape_counts_runs,
    splitting_an_axis_changes_nothing,
)
from shardmath.testing.plan_laws import (
    adjoint_is_transpose,
    bytes_are_needed,
    casting_commutes,
    ends_agree,
    identity_moves_nothing,
    leaving_changes_nothing_else,
    leaving_twice_is_leaving_together,
    path_independence,
    plan_is_proved,
    plan_moves_the_tensor,
    relabeling_commutes,
    round_trip,
    slicing_commutes,
    spelling_is_not_meaning,
    transposing_commutes,
    trees_are_their_tensors,
    windows_are_their_union,
)
from shardmath.testing.strategies import copies, layouts, lengths, pairs, parts, runs, trees

__all__ = ["LAWS", "Law"]


@dataclass(frozen=True)
class Law:
    """A property of shardmath that tests check: `check` raises an error for arguments that break it, and the hypothesis
    strategy `cases` draws the arguments."""

    check: Callable[..., None]
    cases: st.SearchStrategy[tuple[Any, ...]]

    @property
    def name(self) -> str:
        """The name of the law, which is the name of its function."""
        return self.check.__name__


def _on(check: Callable[..., None], *cases: st.SearchStrategy[Any]) -> Law:
    """A law of several arguments, and the strategy of each."""
    return Law(check, st.tuples(*cases))


_copies = pairs(ops=(None,))
_linear_pairs = pairs(ops=(None, "sum", "avg"))

LAWS: tuple[Law, ...] = (
    _on(compose_is_after, runs(), runs()),
    _on(invert_undoes, runs()),
    _on(runs_are_canonical, runs()),
    _on(fast_is_definition, layouts()),
    _on(parse_print, layouts(op="sum")),
    _on(shape_counts_runs, layouts()),
    _on(relabeling_moves_holdings, layouts()),
    _on(mesh_transposition_changes_nothing, layouts()),
    _on(splitting_an_axis_changes_nothing, lengths(), parts(), parts()),
    _on(one_piece_needs_no_border, lengths(), parts(), parts()),
    _on(identity_moves_nothing, layouts(op="sum")),
    Law(plan_is_proved, pairs()),
    Law(plan_moves_the_tensor, pairs()),
    Law(ends_agree, pairs()),
    Law(spelling_is_not_meaning, pairs()),
    Law(round_trip, _copies),
    Law(path_independence, pairs(ops=(None, "sum"), count=3)),
    Law(relabeling_commutes, pairs()),
    Law(bytes_are_needed, _copies),
    Law(transposing_commutes, pairs(ops=(None, "sum"))),
    Law(casting_commutes, _copies),
    Law(slicing_commutes, st.tuples(st.data(), _copies).map(lambda x: (x[0], *x[1]))),
    Law(windows_are_their_union, st.tuples(st.data(), _copies).map(lambda x: (x[0], *x[1]))),
    Law(changes_are_the_difference, st.tuples(st.data(), _copies).map(lambda x: (x[0], *x[1]))),
    Law(adjoint_is_transpose, _linear_pairs),
    _on(trees_are_their_tensors, trees()),
    Law(leaving_changes_nothing_else, copies()),
    Law(leaving_twice_is_leaving_together, copies()),
    _on(digest_is_its_definition, layouts()),
    Law(digest_survives_moves, _copies),
    _on(windows_have_the_digest, st.data(), layouts()),
    _on(any_change_is_found, st.data(), layouts()),
    _on(replicas_are_compared, st.data(), layouts()),
)
"""A tuple of the Laws of layouts, plans and digests; `given(law.cases)(lambda case: law.check(*case))` is a test of
one."""
