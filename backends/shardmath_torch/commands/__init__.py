"""Commands: `python -m shardmath buffers` and `refit`, and `make demo`.

In reading order:

- `models`: shapes and flat buffers of real ones;
- `processes`: local processes that show what they do;
- `command_line`: what the commands share of it;
- `buffers`: `buffers`;
- `refit_bounds`: the least time that a refit could take;
- `refit_out`: where what arrived is left;
- `refit_rank`: a refit on one rank;
- `refit_report`: what it prints;
- `demo`: embeddings with what arrived;
- `refit`: `refit`.
"""
