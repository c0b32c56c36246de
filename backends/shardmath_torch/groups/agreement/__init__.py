"""Agreement: ranks agree before they act, and find out who failed.

In reading order:

- `wire`: what a transport gives: bytes and votes;
- `threads`: threads in torch that nobody waits for without an end;
- `notes`: what processes leave each other in a store, read without waiting;
- `failure`: who failed first;
- `goodbyes`: ranks that are done say so;
- `turns`: what ranks do together, one thing after another;
- `agree`: every rank says what it is about to do;
- `party`: this rank in a group;
- `naming`: how plans and errors are called;
- `transport`: the package that carries a group's bytes;
- `gather`: what every rank says, as objects.
"""
