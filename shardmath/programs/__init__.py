"""Programs: in which rounds a plan is carried out.

In reading order:

- `collectives`: plans that are a collective;
- `program`: a plan as rounds, with what is relayed;
- `messages`: transfers as messages;
- `part`: all that one rank does;
- `protocol`: what a rank goes through, as a table;
- `fanout`: who relays what;
- `loads`: bytes by rank and link, and how long they take;
- `scheduling`: which relays, in how many rounds;
- `certify`: a program beside its bound.
"""
