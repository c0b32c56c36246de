"""Agreement: ranks vote before they act, and find out which rank failed.

In reading order:

- `wire`: the interface of transports: messages and gathered records;
- `threads`: background threads, waited for with a time limit;
- `notes`: short texts in a store, read without waiting;
- `failure`: which rank failed first;
- `goodbyes`: notes of ranks that leave;
- `turns`: joint operations, one after another;
- `agree`: the vote on every rank's intent;
- `party`: this rank in a group;
- `naming`: names of plans and errors in votes;
- `transport`: the package that carries a group's bytes;
- `gather`: one Python object from every rank.
"""
