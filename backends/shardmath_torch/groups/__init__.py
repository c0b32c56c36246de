"""Groups: processes connect, vote before they act, and find out which rank failed.

In reading order:

- `forks`: process groups of the process that this one was forked from;
- `joint_group`: process groups that torch's registry does not know;
- `ports`: the ports on which this process listens;
- `compat`: torch's private APIs, and APIs that change between versions;
- `dtypes`: torch's element types, and the arithmetic they have;
- `stores`: key-value stores of process groups, whose servers may end before the others;
- `agreement`: ranks vote before they act, and find out which rank failed;
- `joint`: processes of several jobs find each other.
"""
