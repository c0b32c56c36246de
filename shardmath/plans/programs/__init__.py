"""Programs: the rounds in which a plan is carried out.

In reading order:

- `legs`: cuts of blocks, and groups of ranks that share the bytes that enter them;
- `streams`: bytes from rank to rank, straight or relayed;
- `messages`: the messages and rounds that ranks post;
- `program`: a plan as rounds of messages, with relays;
- `cutting`: a plan as rounds of messages, without relays;
- `part`: everything that one rank does;
- `mates`: ranks that send for the busy holders of their node;
- `fanout`: the choice of relays;
- `loads`: bytes by rank and link, and the time that they take;
- `tapers`: weights of slots that fall, so that little is relayed at the end;
- `scheduling`: the choice of relays and of the number of rounds;
- `alternatives`: what a move would take if it were done in other ways;
- `certify`: a program compared with its bound.
"""
