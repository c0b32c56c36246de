"""What callers give: numpy's and other odd values become Python's own, or a ShardError says what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest

import shardmath as sm
from shardmath import buffers
from shardmath.base.arguments import as_integer, instance, known, listed, mapping, text
from shardmath.base.errors import LayoutError, MeshError, ParamLayoutError, PlanError, ShardError
from shardmath.base.text import plural, shown
from shardmath.display.pictures.text import show
from shardmath.layouts import edits, store
from shardmath.layouts.algebra import cuts, runs
from shardmath.models.systems import rules
from shardmath.pictures import buffer_map, buffer_svg, grid

PLAIN = (int, float, str, bool, type(None), complex)


def leaves(value: object) -> Iterator[object]:
    """All that a value is made of, slots of dataclasses included; arrays are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name != "_form":  # a layout's own, which may be the layout itself
                yield from leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from leaves([*value.keys(), *value.values()])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, slice):
        yield from leaves([value.start, value.stop, value.step])
    elif not isinstance(value, np.ndarray):
        yield value


def assert_plain(value: object) -> None:
    odd = [leaf for leaf in leaves(value) if type(leaf) not in PLAIN]
    assert not odd, (type(odd[0]), odd[0])


class Axis(enum.StrEnum):
    TP = "tp"


class Count(enum.IntEnum):
    TWO = 2


NUMBERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
NAMES = (np.str_, type("Name", (str,), {}))


def of(i: Callable[[int], int], s: Callable[[str], str]) -> list[object]:
    """One of each public value, its integers made by `i` and its text by `s`."""
    mesh = sm.Mesh({s("tp"): i(2)}, ranks=[i(0), i(1)])
    params = [
        buffers.Param(
            s("a"), [i(4), i(6)], s("bfloat16"), s("float32"), s("fp8"), gtp_remat_size=i(1)
        )
    ]
    zero = buffers.zero(params, data_parallel_world_size=i(2))
    halves = (runs.from_ranges([(i(0), i(2))]), sm.Runs([[i(0), i(2), i(2)]], i(2)))
    made: list[object] = [
        mesh, mesh.split(s("tp"), a=i(2), b=i(1)), mesh.relabel({0: i(7)}), mesh.merge([s("tp")], s("x")),
        sm.Shard(i(0)), sm.Balanced(i(0)), sm.StridedShard(i(0), i(2)), sm.Packed(i(0), [i(2), i(2)]),
        sm.Ragged(i(0), [i(2), i(2)]), sm.BlockCyclic(i(0), i(3)), sm.Table(i(0), list(halves)), sm.Partial(s("sum")),
        cuts.Chunks(i(2)), cuts.BalancedChunks(i(2)), cuts.FixedBlock(i(2)), cuts.Sizes([i(2), i(2)]),
        halves, runs.identity(i(4)), runs.invert(halves[1], i(4)), runs.restrict(halves[1], i(2), i(3)),
        sm.Topology(ranks_per_node=i(4), latency_s=i(0)), store.View(s("b"), i(3), [i(1)]),
        store.Store({(s("w"), i(0)): store.View(s("b"))}),
        store.flat_windows(s("w"), [i(3), i(4)], {i(1): (i(0), i(7))}),
        params, zero, buffers.shard_ranges(zero, i(2), i(1)), buffers.layer_wise(params, data_parallel_world_size=i(2)),
        buffers.PerBufferParamLayout({s("a"): [i(0), i(4), i(0)]}, [[i(0), i(4)]], [i(4)], shapes=[[i(4)]]),
        buffers.BufferKey(s("bfloat16"), s("float32"), np.bool_(True)), buffers.pad_to_divisor(i(5), i(2)),
        rules.Rule(s("*"), s("(tp n) ...")), rules.parse(s("tp=2"), first_rank=i(3)),
    ]  # fmt: skip
    specs = [{s("tp"): placement} for placement in made[4:11]] + [s("(tp n)"), (sm.Shard(i(-1)),)]
    laid = [
        sm.Layout([i(4)], mesh, spec, dtype=s("int8"), reading=s("placement")) for spec in specs
    ]
    laid += [
        sm.Layout((i(4),), mesh, {}, stored={i(0): i(5)}),
        edits.window(laid[0], [[i(1), i(3)]]),
    ]
    laid += [edits.transposed(laid[0], [i(0)]), edits.cast(laid[0], s("int16"))]
    p = sm.plan({s("w"): laid[0]}, {s("w"): laid[1]})
    return [*made, laid, list(p.transfers(src=i(0))), p.src, p.digest]


@pytest.mark.parametrize("number", NUMBERS)
def test_numpy_s_integers_become_python_s(number: Callable[[int], int]) -> None:
    """They were kept: sizes ran over, and digests of equal layouts differed."""
    made = of(lambda n: n if n < 0 else number(n), str)
    assert_plain(made)
    assert repr(made) == repr(of(int, str))


@pytest.mark.parametrize("name", NAMES)
def test_other_kinds_of_str_become_str(name: Callable[[str], str]) -> None:
    made = of(int, name)
    assert_plain(made)
    assert repr(made) == repr(of(int, str))


def test_enumerations_are_their_values() -> None:
    mesh = sm.Mesh({Axis.TP: Count.TWO})
    assert_plain(mesh)
    assert repr(mesh) == "Mesh(tp=2)"
    assert_plain(sm.Layout((Count.TWO,), mesh, {Axis.TP: sm.StridedShard(0, Count.TWO)}))


@pytest.mark.parametrize(
    ("kind", "block", "n"), [(np.int8, 40, 100), (np.int16, 10_000, 30_000), (np.uint8, 200, 900)]
)
def test_products_do_not_run_over(kind: type, block: int, n: int) -> None:
    """Every rank held nothing."""
    mesh = sm.Mesh(cp=4)
    held = [sm.Layout((n,), mesh, {"cp": sm.BlockCyclic(0, size)}) for size in (kind(block), block)]
    assert held[0] is held[1]
    assert sum(held[0].local_shape(rank)[0] for rank in range(4)) == n
    assert sm.Mesh(a=np.int8(100), b=np.int8(2)).size == 200


@dataclass(frozen=True)
class Numpy:
    """A user's placement that counts in numpy."""

    dim: int
    kind: type = np.int16

    def split(self, n: int, parts: int) -> tuple[sm.Runs, ...]:
        at = [self.kind(n * i // parts) for i in range(parts + 1)]
        return tuple(sm.Runs([(0, a, b - a)], b - a) for a, b in itertools.pairwise(at))


def test_what_a_user_s_placement_counts_in_numpy_is_python_s() -> None:
    mesh = sm.Mesh(q=3)
    held = sm.Layout((100,), mesh, {"q": Numpy(np.int64(0))})
    for rank in mesh.ranks:
        assert_plain(held.runs(rank))
    assert sm.equivalent(held, sm.Layout((100,), mesh, {"q": sm.Ragged(0, (33, 33, 34))}))
    assert (
        sm.plan(held, held).digest
        == sm.plan(*[sm.Layout((100,), mesh, "(q[33 33 34] n)")] * 2).digest
    )


def test_claims_may_count_in_numpy() -> None:
    mesh = sm.Mesh(tp=2)
    p = sm.plan(sm.Layout((300, 2), mesh, "(tp n) h"), sm.Layout((300, 2), mesh, "n h"))
    claim = [
        t._replace(
            src_rank=np.int8(t.src_rank),
            nbytes=np.int16(t.nbytes),
            shape=list(map(np.int16, t.shape)),
            global_slices=tuple(
                slice(np.int16(s.start), np.int16(s.stop)) for s in t.global_slices
            ),
        )
        for t in p.transfers()
    ]
    sm.verify(p, transfers=claim)
    with pytest.raises(PlanError, match="never receives"):
        sm.verify(p, transfers=claim[1:])


def test_a_list_that_changes_later_changes_no_value() -> None:
    sizes, parts, steps = [2, 2], [runs.identity(4)], [1]
    values = sm.Packed(0, sizes), sm.Table(0, parts), store.View("b", 0, steps)
    before = repr(values)
    sizes.append(3), parts.append(runs.identity(1)), steps.append(9)
    assert repr(values) == before
    assert hash(values) == hash(values)


# odd values

MESH, SMALL = sm.Mesh(dp=2, tp=2), sm.Mesh(tp=2)
A, B, ADDENDS = (
    sm.Layout((4, 6), MESH, spec) for spec in ("(tp n) h", "n (dp h)", "n h {sum: dp}")
)
PLAN, TREE = sm.plan(A, B), sm.plan({"a": A}, {"a": B})
PROGRAM = sm.schedule(PLAN)
PARAMS = [buffers.Param("a", (4, 6)), buffers.Param("b", (3,))]
FLAT = buffers.zero(PARAMS, data_parallel_world_size=2)
WHOLE = {param.name: sm.Layout(param.shape, SMALL, {}) for param in PARAMS}
HELD = store.Store({("a", 0): store.View("b")})
ARRAYS = {r: np.zeros(A.local_shape(r)) for r in range(4)}


class Refuses:
    """Equal to nothing, and says so by raising."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __hash__(self) -> int:
        return 1


ODD = [
    None, 0, 1, -1, True, 1.5, float("nan"), float("inf"), 10**30, -(10**30), 10**100, "", "x", "tp", "(tp n) h",
    "\u00e9\ud800", b"x", [], (), {}, set(), object(), np.int64(3), np.array([1, 2]), np.array(3), np.array([]),
    np.float32(2), np.bool_(True), range(3), A, B, ADDENDS, MESH, SMALL, PLAN, TREE, PROGRAM, FLAT, len, int, Exception,
    [None], (None,), [[1]], {"a": 1}, {"a": A}, {"a": (A,)}, {"a": ()}, {"a": None}, {1: A}, {0: np.zeros(3)}, (4, 6),
    (4, -6), (2**40, 2**40), ("4", 6), (4.0, 6), {"tp": sm.Shard(0)}, {"tp": sm.Shard(9)}, {("tp", "dp"): sm.Shard(0)},
    {"tp": 3}, (sm.Shard(0), sm.Shard(0)), (sm.Shard(0),), sm.Shard(0), sm.Replicate(), sm.Partial("sum"), slice(1, 2),
    3 + 4j, Ellipsis, NotImplemented, iter([1, 2]), PARAMS, PARAMS[0], [(0, 4)], ((0, 4), (0, 6)), [(4, 0)], "float32",
    "int4", "complex64", memoryview(b"ab"), np.dtype("float32"), "a" * 10000, sm.Topology(), 2**63, 2**31,
    np.uint64(2**63), Refuses(), b"(tp n)", {None: 1}, [("a", 1)], {("a", 0): store.View("b")}, {"": {}},
]  # fmt: skip


def on(placement: Callable[..., object]) -> Callable[..., object]:
    return lambda *args: sm.Layout((4,), SMALL, {"tp": placement(*args)}).runs(0)


EVERY = buffers.full_layout
CALLS: dict[str, tuple[Callable[..., object], list[object], dict[str, object]]] = {
    "Mesh": (sm.Mesh, [{"dp": 2}], {"ranks": [0, 1]}), "coords": (MESH.coords, [1], {}),
    "coordinate": (MESH.coordinate, [["dp"]], {}), "axis_size": (MESH.axis_size, ["dp"], {}),
    "split": (MESH.split, ["dp"], {"a": 2, "b": 1}), "merge": (MESH.merge, [["dp", "tp"], "x"], {}),
    "transpose": (MESH.transpose, [["tp", "dp"]], {}), "select": (MESH.select, [], {"dp": 0}),
    "relabel": (MESH.relabel, [{0: 9}], {}),
    "Layout": (
        sm.Layout, [(4, 6), MESH, "(tp n) h"], {"dtype": "int8", "reading": "order", "stored": None, "rules": None}
    ),
    "of a tuple": (sm.Layout, [(4, 6), MESH, (sm.Shard(0), sm.Replicate())], {"stored": {0: 5}, "reading": "order"}),
    "runs": (A.runs, [1], {}), "Shard": (on(sm.Shard), [0], {}), "StridedShard": (on(sm.StridedShard), [0, 2], {}),
    "Packed": (on(sm.Packed), [0, (1, 3)], {}), "Ragged": (on(sm.Ragged), [0, (1, 3)], {}),
    "BlockCyclic": (on(sm.BlockCyclic), [0, 2], {}), "Table": (on(sm.Table), [0, [runs.identity(4)] * 2], {}),
    "Partial": (on(sm.Partial), ["sum"], {}), "Runs": (sm.Runs, [((0, 0, 2),), 3], {}),
    "from_ranges": (runs.from_ranges, [[(0, 2), 1]], {}), "identity": (runs.identity, [3], {}),
    "invert": (runs.invert, [runs.identity(2), 3], {}), "window": (edits.window, [A, ((0, 2), (0, 6))], {}),
    "sliced": (edits.sliced, [A, ((0, 2), (0, 6))], {}), "transposed": (edits.transposed, [A, (1, 0)], {}),
    "cast": (edits.cast, [A, "bfloat16"], {}), "relabeled": (edits.relabeled, [A, {0: 7}], {}),
    "equivalent": (sm.equivalent, [A, B], {}), "plan": (sm.plan, [A, B], {"topology": None}),
    "transfers": (lambda **k: list(PLAN.transfers(**k)), [], {"src": 0, "dst": 1}),
    "verify": (sm.verify, [PLAN], {"transfers": None}), "adjoint": (sm.adjoint, [PLAN], {}),
    "schedule": (
        sm.schedule, [PLAN], {"topology": None, "max_inflight_bytes": 99, "max_ops_per_group": 5, "fanout": "none"}
    ),
    "certify": (sm.certify, [PROGRAM], {"topology": sm.Topology()}), "for_rank": (PROGRAM.for_rank, [0], {}),
    "simulate": (sm.simulate, [PLAN, ARRAYS], {}), "fill": (TREE.fill, ["a"], {}), "divisor": (TREE.divisor, ["a"], {}),
    "Topology": (sm.Topology, [], {"ranks_per_node": 8, "intra_bytes_per_s": 1e9, "latency_s": 0}),
    "nodes": (sm.Topology().nodes, [[1, 2]], {}), "node": (sm.Topology().node, [3], {}),
    "flat_windows": (store.flat_windows, ["w", (4, 5), {0: (0, 7)}], {"dtype": "float32", "buffer": None}),
    "View": (lambda *a: store.Store({("a", 0): store.View(*a)}).place("a", A, 0), ["b", 0, (6, 1)], {}),
    "Store": (store.Store, [{("w", 0): store.View("b")}], {}), "place": (HELD.place, ["a", A, 0], {}),
    "check": (store.check, [HELD, {"a": A}, 0], {}),
    "views": (store.views, [HELD, {"a": A}, 0, {"b": np.zeros(100)}], {}),
    "Param": (buffers.Param, ["a", (4, 6)], {"quantized": False, "managed": None, "dtype": "int8"}),
    "zero": (buffers.zero, [PARAMS], {"data_parallel_world_size": 2}),
    "layer_wise": (buffers.layer_wise, [PARAMS], {"data_parallel_world_size": 2}),
    "full_layout": (EVERY, [PARAMS], {"rule": buffers.zero, "beside": None, "data_parallel_world_size": 2}),
    "shard_ranges": (buffers.shard_ranges, [FLAT, 2, 0], {}), "pad_to_divisor": (buffers.pad_to_divisor, [5, 2], {}),
    "state_layouts": (
        buffers.state_layouts, [FLAT, SMALL], {"shape": "nd", "axis": None, "ranks": None, "buffer": "s"}
    ),
    "state_store": (buffers.state_store, [FLAT, SMALL], {"axis": None, "ranks": None, "buffer": "s"}),
    "PerBuffer": (buffers.PerBufferParamLayout, [{"a": (0, 4, 0)}, [(0, 4)], [4]], {"shapes": [(4,)]}),
    "nvfp4": (buffers.nvfp4_packed, [PARAMS, FLAT], {"data_parallel_world_size": 2}),
    "parse": (rules.parse, ["dp=2 tp=2: * ..."], {"first_rank": 0}), "Rule": (rules.Rule, ["*", "..."], {}),
    "layouts": (rules.parse("tp=2").layouts, [{"a": ((4, 6), "int8")}], {}), "show": (show, [A], {}),
    "Side": (rules.Side, [MESH, ()], {}), "most": (show, [PLAN, 3], {}),
    "in a mesh": (MESH.__contains__, [1], {}), "position": (MESH.position, [1], {}),
    "groups": (MESH.groups, [["dp"]], {}),
    "grid": (grid, [A], {"most": 8}), "svg of a plan": (PLAN.svg, [], {"topology": None, "tensor": ""}),
    "svg of a program": (PROGRAM.svg, [], {"tensor": None}), "svg of a mesh": (MESH.svg, [], {"topology": None}),
    "buffer_map": (buffer_map, [FLAT, 2], {}), "buffer_svg": (buffer_svg, [FLAT, 2], {}),
    "local_name": (store.local_name, ["w", 0, 2], {}),
    "local_tensors": (lambda *a: list(store.local_tensors(*a)), ["w", (A, B)], {}),
    "locals_of": (lambda *a: list(store.locals_of(*a)), [{"w": A}, 0], {}),
    "shard_numel": (buffers.shard_numel, [FLAT, 2], {}),
    "state_numel": (buffers.state_numel, [FLAT, SMALL], {"axis": None}),
    "model_parallel_state": (
        buffers.model_parallel_state, [PARAMS, WHOLE],
        {"mesh": SMALL, "axis": "tp", "rule": buffers.zero, "dtype": "int8", "ranks": None, "buffer": "s"},
    ),
    "svg of an adjoint": (sm.adjoint(PLAN).svg, [], {"tensor": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_wrong_with_a_value_is_a_shard_error(name: str) -> None:
    """One odd value in one place: 79 kinds of other errors, from AttributeError to MemoryError, came of these."""
    call, args, keywords = CALLS[name]
    call(*args, **keywords)
    for odd in ODD:
        for i in range(len(args)):
            _refused(call, [*args[:i], odd, *args[i + 1 :]], keywords)
        for key in keywords:
            _refused(call, args, {**keywords, key: odd})


def _refused(call: Callable[..., object], args: list[object], keywords: dict[str, object]) -> None:
    with contextlib.suppress(ShardError):
        call(*args, **keywords)


def test_a_size_that_the_mesh_has_given_again(fails) -> None:
    given = {"mesh": SMALL, "axis": "tp", "rule": buffers.zero, "data_parallel_world_size": 2}
    fails(
        lambda: buffers.model_parallel_state(PARAMS, WHOLE, **given),
        ParamLayoutError,
        "data_parallel_world_size=2 is passed, and is the size of each group; leave it out",
    )


# the checkers


def test_checkers_say_what_is_wrong(fails) -> None:
    fails(lambda: as_integer(10**100, "the size", MeshError), MeshError, _huge(10**100))
    fails(lambda: text(3, "a name", MeshError), MeshError, "a name is 3; give a str")
    fails(lambda: listed("12", "sizes", LayoutError), LayoutError, "sizes are '12'; give a tuple")
    fails(
        lambda: listed(np.array(3), "sizes", LayoutError),
        LayoutError,
        "sizes are array(3); give a tuple",
    )
    fails(
        lambda: mapping([1], "ranks are ", "old to new", PlanError),
        PlanError,
        "ranks are [1]; give a mapping from old to new",
    )
    fails(
        lambda: instance(3, sm.Mesh, "give one", PlanError), PlanError, "3 is not a Mesh; give one"
    )
    assert known(np.array(["sum"]), ("sum",)) is None and known(Refuses(), ("sum",)) is None
    assert len(shown("a" * 1000)) == 203 and shown(10**5000) == "<int that cannot be printed>"
    assert plural(1, "box", "boxes") == "1 box" and plural((), "box", "boxes") == "0 boxes"


def _huge(number: int) -> str:
    return f"the size is an integer of {number.bit_length()} bits; give one of 64 bits at most"
