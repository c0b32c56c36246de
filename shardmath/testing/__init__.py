"""Testing: strategies for every value, a brute-force oracle, and the laws by name.

Whoever writes a placement checks it with `check_placement`:

    from hypothesis import given
    from shardmath import testing

    @given(testing.lengths(), testing.parts())
    def test_mine(n, parts):
        testing.check_placement(Mine(0), n, parts)

`lengths` draws small sizes, and ones up to 4096 at and around multiples of blocks;
`lengths(100_000)` and `parts(64)` go further. One case of a million rows takes seconds; so check a
placement of long blocks on one of its own sizes too.

A rule of buffers is checked with `check_rule`, on what `params` draws, and a transform with
`check_transform`, on what `transform_cases` does; every value of ours obeys `LAWS`:
`given(law.cases)(lambda case: law.check(*case))`. Needs hypothesis (the extra `testing`).

In reading order:

- `oracle`: what local arrays stand for, by brute force;
- `strategies`: values drawn with all the awkward cases;
- `placements`: what every placement keeps;
- `layout_laws`: what all Runs and layouts keep;
- `plan_laws`: what all plans keep;
- `transform_laws`: what all transforms keep;
- `content_laws`: what digests of content keep, and what is sent of it where little has changed;
- `laws`: all of these laws by name, and their cases;
- `buffers`: what every rule of buffers keeps;
- `rounds`: whether ranks that walk their rounds get to the end.
"""

try:
    import hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "shardmath.testing needs hypothesis; pip install 'shardmath[testing]'"
    ) from error

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
    register_strategies,
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
