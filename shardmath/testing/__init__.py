"""Testing: strategies for every value, a brute-force oracle, and the laws by name.

Check a custom placement with `check_placement`:

    from hypothesis import given
    from shardmath import testing

    @given(testing.lengths(), testing.parts())
    def test_mine(n, parts):
        testing.check_placement(Mine(0), n, parts)

`lengths` draws small sizes, and ones up to 4096 at and around multiples of blocks;
`lengths(100_000)` and `parts(64)` go further. One case of a million rows takes seconds; so check a
placement of long blocks also on a real size.

Check a rule of buffers with `check_rule`, on parameters that `params` draws, and a transform with
`check_transform`, on cases that `transform_cases` draws. Values of shardmath obey `LAWS`:
`given(law.cases)(lambda case: law.check(*case))`. Needs hypothesis (the extra `testing`).

In reading order:

- `oracle`: what local arrays stand for, by brute force;
- `strategies`: values drawn with all the awkward cases;
- `placements`: the laws of placements;
- `layout_laws`: the laws of Runs and layouts;
- `plan_laws`: the laws of plans;
- `transform_laws`: the laws of transforms;
- `content_laws`: the laws of digests of content, and of sending only changed elements;
- `laws`: all of these laws by name, and their cases;
- `buffers`: the laws of rules of buffers;
- `rounds`: a check that ranks which walk their rounds get to the end.
"""

try:
    import hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "shardmath.testing needs hypothesis; pip install 'shardmath[testing]'"
    ) from error

from shardmath.layouts.from_type import register_strategies
from shardmath.testing.buffers import RULE_LAWS, RuleCase, check_rule, params, rule_cases
from shardmath.testing.laws import LAWS, Law
from shardmath.testing.oracle import addends, distribute, run, value
from shardmath.testing.placements import PLACEMENT_LAWS, check_placement
from shardmath.testing.strategies import (
    boxes,
    layouts,
    lengths,
    meshes,
    pairs,
    parts,
    placements,
    runs,
    shapes,
    tilings,
    trees,
)
from shardmath.testing.transform_laws import (
    TRANSFORM_LAWS,
    check_transform,
    transform_cases,
)

__all__ = [
    "LAWS",
    "PLACEMENT_LAWS",
    "RULE_LAWS",
    "TRANSFORM_LAWS",
    "Law",
    "RuleCase",
    "addends",
    "boxes",
    "check_placement",
    "check_rule",
    "check_transform",
    "distribute",
    "layouts",
    "lengths",
    "meshes",
    "pairs",
    "params",
    "parts",
    "placements",
    "register_strategies",
    "rule_cases",
    "run",
    "runs",
    "shapes",
    "tilings",
    "transform_cases",
    "trees",
    "value",
]

register_strategies()
