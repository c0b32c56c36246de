"""Commands: the commands of `python -m shardmath` that need only the core.

python -m shardmath show "dp=4 tp=2" 9,4 "(tp dp n) h"
python -m shardmath plan "tp=4" "tp=2 ranks=4:6" 8,4 "(tp n) h" "n (tp h)" --nodes 2 --json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from shardmath.base.errors import LayoutError, NotationError, PlacementError
from shardmath.display.arguments import add_json, make_parser, print_json, working, write_svg
from shardmath.display.explorer.facts import (
    cost_facts,
    describe_proof,
    layout_facts,
    plan_facts,
)
from shardmath.display.explorer.question import parse_shape
from shardmath.display.pictures.drawing import svg
from shardmath.display.pictures.text import show
from shardmath.layouts.layout import Layout
from shardmath.layouts.notation import count_dimensions
from shardmath.models.systems.rules import parse_mesh
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan, plan
from shardmath.plans.programs.certify import certify, crossing_bytes
from shardmath.proofs.verify import verify

__all__ = ["BUILT_IN", "Command"]

Command = Callable[[Sequence[str]], int]


def _read_shape(text: str) -> tuple[int, ...]:
    """Parse sizes with commas between them."""
    try:
        return parse_shape(text)
    except LayoutError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _read_count(text: str) -> int:
    """Parse a number of 1 or more."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more; write digits: 8")
    return int(text)


def _show(argv: Sequence[str]) -> int:
    """Print what each rank holds."""
    parser = make_parser("show", _show.__doc__)
    parser.add_argument("mesh", help='axes and sizes: "dp=4 tp=2"')
    parser.add_argument("shape", type=_read_shape, help="global shape: 9,4")
    parser.add_argument("layout", help='notation: "(tp dp n) h"')
    _add_dtype(parser)
    parser.add_argument("--svg", metavar="FILE", help="also write a picture")
    add_json(parser)
    given = parser.parse_args(argv)
    mesh = parse_mesh(given.mesh)
    layout = Layout(given.shape, mesh, given.layout, dtype=given.dtype)
    with working("reading the layout"):
        if given.svg:
            write_svg(given.svg, svg(layout))
        if given.json:
            print_json("show", layout_facts(layout, most=mesh.size))
        else:
            print(show(layout))
    return 0


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="float32", help="dtype of the tensor, by default float32"
    )


def _plan(argv: Sequence[str]) -> int:
    """Plan a move between two layouts, prove it, and print who sends what."""
    parser = make_parser("plan", _plan.__doc__)
    _add_sides(parser)
    parser.add_argument(
        "--nodes",
        type=_read_count,
        metavar="N",
        help="ranks per node: prefer senders on the receiver's node, and say "
        "what crosses nodes and how long the move takes",
    )
    parser.add_argument("--svg", metavar="FILE", help="also write a picture")
    add_json(parser)
    given = parser.parse_args(argv)
    topology = None if given.nodes is None else Topology(ranks_per_node=given.nodes)
    with working("planning"):
        planned = _make_plan(given, topology)
        # Its facts are proved before they are listed.
        facts = plan_facts(planned, most=None) if given.json else None
        if facts is None:
            verify(planned)
        if given.svg:
            write_svg(given.svg, svg(planned, topology=topology))
        if facts is not None:
            sides = {"src": str(planned.src[""][0]), "dst": str(planned.dst[""][0])}
            cost = {} if topology is None else cost_facts(planned, topology)
            print_json("plan", sides | facts | {"cost": cost})
            return 0
        print(show(planned))
        if topology is not None:
            crossing = crossing_bytes(planned, topology)
            print(f"{crossing} B cross nodes; {certify(planned, topology)}")
        print(_word_proof(planned))
    return 0


def _verify(argv: Sequence[str]) -> int:
    """Plan a move between two layouts and prove it. The exit status is 0 if every element arrives exactly once."""
    parser = make_parser("verify", _verify.__doc__)
    _add_sides(parser)
    add_json(parser)
    given = parser.parse_args(argv)
    with working("planning"):
        planned = _make_plan(given, None)
        verify(planned)
    if given.json:
        sent = sum(planned.sent_bytes().values())
        facts = {"proof": describe_proof(planned), "digest": planned.digest, "bytes": sent}
        print_json("verify", facts)
    else:
        print(_word_proof(planned))
    return 0


def _prove(argv: Sequence[str]) -> int:
    """Decide for all sizes whether ranks hold each element once, or whether a move brings each element exactly once.
    The exit status is 0 if this is proved, 1 for a counterexample or an error, and 3 if it was only tested."""
    parser = make_parser("prove", _prove.__doc__)
    parser.add_argument("mesh", help='axes and sizes: "dp=4 tp=2"')
    parser.add_argument("layout", help='notation: "(tp dp n) h"')
    parser.add_argument("dst_mesh", nargs="?", help="axes and sizes of a second layout")
    parser.add_argument("dst", nargs="?", help="the second layout: the destination of a move")
    parser.add_argument(
        "--equivalent",
        action="store_true",
        help="decide whether both layouts give every rank the same elements",
    )
    shape_help = "global shape, for dimensions that have one size only: 12,4"
    parser.add_argument("--shape", type=_read_shape, help=shape_help)
    add_json(parser)
    given = parser.parse_args(argv)
    is_pair = given.dst is not None
    if is_pair != (given.dst_mesh is not None) or given.equivalent > is_pair:
        parser.error("give a mesh and a layout, or two of each")
    # Only this command needs these proofs.
    from shardmath.proofs.sizes.prove import prove, prove_equivalent

    with working("proving"):
        layouts = [_read_example(given.mesh, given.layout, given.shape)]
        if is_pair:
            layouts.append(_read_example(given.dst_mesh, given.dst, given.shape))
        verdict = (prove_equivalent if given.equivalent else prove)(*layouts)
    found = verdict.counterexample
    if given.json:
        facts = {
            "proved": verdict.proved,
            "law": verdict.law,
            "dimensions": [dim._asdict() for dim in verdict.dims],
            "counterexample": found and found._asdict(),
        }
        print_json("prove", facts)
    else:
        print(verdict)
    return 1 if found else 0 if verdict.proved else 3


def _read_example(mesh_text: str, text: str, shape: tuple[int, ...] | None) -> Layout:
    """The layout of this shape, or of one with as many dimensions as the text has, whose sizes do not matter."""
    mesh = parse_mesh(mesh_text)
    if shape is not None:
        return Layout(shape, mesh, text)
    try:
        return Layout((0,) * count_dimensions(text, mesh.shape), mesh, text)
    except (LayoutError, NotationError, PlacementError) as error:
        raise LayoutError(f"{error}\n(if the text fixes sizes, pass --shape)") from None


def _add_sides(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what moves."""
    parser.add_argument("src_mesh", help='axes and sizes of the source: "tp=4"')
    parser.add_argument("dst_mesh", help='axes and sizes of the destination: "tp=2 ranks=4:6"')
    parser.add_argument("shape", type=_read_shape, help="global shape: 8,4")
    parser.add_argument("src", help='layout at the source: "(tp n) h"')
    parser.add_argument("dst", help='layout at the destination: "n (tp h)"')
    _add_dtype(parser)
    window_help = "the destination may hold less than the tensor"
    parser.add_argument("--window", action="store_true", help=window_help)


def _make_plan(given: argparse.Namespace, topology: Topology | None) -> Plan:
    """The plan that the arguments of `_add_sides` describe."""
    src = Layout(given.shape, parse_mesh(given.src_mesh), given.src, dtype=given.dtype)
    dst = Layout(given.shape, parse_mesh(given.dst_mesh), given.dst, dtype=given.dtype)
    return plan(src, dst, topology=topology, window=given.window)


def _word_proof(planned: Plan) -> str:
    return f"proved: {describe_proof(planned)}; digest {planned.digest[:16]}"


def _merge_traces(argv: Sequence[str]) -> int:
    """Merge what `smt.trace` wrote on several ranks into one file, which Perfetto (ui.perfetto.dev) opens."""
    parser = make_parser("trace", _merge_traces.__doc__)
    parser.add_argument("files", nargs="+", help="the trace files, one per rank")
    parser.add_argument("--out", help="path of the file to write with the merged trace")
    parser.add_argument("--svg", help="path of the file to write with a picture of the trace")
    given = parser.parse_args(argv)
    # Only this command needs traces.
    from shardmath.display.traces.chrome import read, write, write_text
    from shardmath.display.traces.drawing import svg as draw
    from shardmath.display.traces.merging import merge

    with working("merging the traces"):
        traces = [read(file) for file in given.files]
        # A single file may be a merged trace already.
        trace = merge(traces) if len(traces) > 1 else traces[0]
        if given.out:
            write(trace, given.out)
        if given.svg:
            write_text(draw(trace), given.svg)
    print(trace)
    return 0


def _list_formats(argv: Sequence[str]) -> int:
    """List the quantized formats: data, scales, shape of the scales of a matrix of M rows and K columns, and cuts."""
    parser = make_parser("formats", _list_formats.__doc__)
    add_json(parser)
    given = parser.parse_args(argv)
    # Only this command needs formats.
    from shardmath.values.formats.listing import listing, show_listing

    if given.json:
        print_json("formats", {"formats": [row._asdict() for row in listing()]})
    else:
        print(show_listing())
    return 0


def _explore(argv: Sequence[str]) -> int:
    """Serve a page on the loopback on which two layouts are typed; their move is planned, proved and drawn as you type.
    Ctrl-C ends it."""
    parser = make_parser("explore", _explore.__doc__)
    parser.add_argument(
        "--port",
        type=int,
        default=8765,
        help="port on 127.0.0.1, by default 8765; 0 for any free one",
    )
    given = parser.parse_args(argv)
    # Only this command needs a server.
    from shardmath.display.explorer.server import Explorer

    try:
        explorer = Explorer(given.port)
    except (OSError, OverflowError) as error:
        what = f"error: cannot serve on port {given.port}: {error}; pass another --port"
        print(what, file=sys.stderr)
        return 1
    with explorer:
        print(f"open {explorer.url} in a browser; Ctrl-C ends the server", flush=True)
        with suppress(KeyboardInterrupt):
            explorer.serve()
    return 0


BUILT_IN: dict[str, Command] = {
    "explore": _explore,
    "show": _show,
    "formats": _list_formats,
    "plan": _plan,
    "prove": _prove,
    "trace": _merge_traces,
    "verify": _verify,
}
