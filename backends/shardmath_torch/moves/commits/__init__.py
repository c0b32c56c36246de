"""Commits: moves received next to the destination, and put in place by all ranks or none.

In reading order:

- `record`: the ranks' decision, in the group's store;
- `conclude`: a rank's steps from its promise to the end;
- `shadows`: memory next to the destination;
- `entry`: one move of a commit;
- `blocks`: several moves that are committed together;
- `landing`: the state of a mover's destinations on this rank.
"""
