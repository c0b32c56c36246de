"""Programs: in which rounds a plan is carried out.

In reading order:

- `legs`: how contents are cut, and who shares what enters;
- `streams`: what goes from rank to rank, straight or relayed;
- `messages`: messages and rounds, what ranks post;
- `stretch_parts`: what stretches have of the tensors of rows;
- `spelling`: the transfers that they are;
- `program`: a plan as rounds of messages, with what is relayed;
- `cutting`: a plan as rounds of messages, with nothing relayed;
- `part`: all that one rank does;
- `fanout`: who relays what;
- `loads`: bytes by rank and link, and how long they take;
- `scheduling`: which relays, in how many rounds;
- `certify`: a program beside its bound.
"""
