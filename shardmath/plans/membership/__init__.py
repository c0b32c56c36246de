"""Membership: plans that ranks leave, and their parts for the ranks that stay.

In reading order:

- `staying`: the destination without the ranks that left;
- `lines`: the lines without the bytes for ranks that left;
- `leaving`: the plan from which ranks have left;
- `keeping`: a rank's part in that plan, made from the part that it had before.
"""
