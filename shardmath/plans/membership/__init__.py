"""Membership: ranks that leave a plan, and what stays for those that do not.

In reading order:

- `staying`: what is left of a destination when some of its ranks are gone;
- `lines`: what is left of who sends what;
- `leaving`: the plan from which ranks have left;
- `keeping`: a rank's part in it, of the part that the rank had.
"""
