"""Groups: processes find each other, agree before they act, and find out who failed.

In reading order:

- `joint_group`: process groups that torch's registry does not know;
- `ports`: the ports on which this process listens;
- `compat`: what torch keeps to itself or changes between versions;
- `dtypes`: torch's element types, and the arithmetic they have;
- `stores`: key-value stores of process groups, whose servers may end before the others;
- `agreement`: ranks agree before they act, and find out who failed;
- `joint`: processes of several jobs find each other.
"""
