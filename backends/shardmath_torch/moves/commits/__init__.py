"""Commits: what is received beside the destination and put in place by all ranks, or by none.

In reading order:

- `record`: what ranks decide, in the group's store;
- `conclude`: from a rank's promise to its end;
- `shadows`: memory beside the destination;
- `entry`: one move of a commit;
- `blocks`: several moves that are committed together;
- `landing`: where a mover's bytes arrive, and what of them is in place.
"""
