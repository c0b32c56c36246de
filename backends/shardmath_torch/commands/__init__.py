"""Commands: `python -m shardmath buffers` and `refit`, and `make demo`.

In reading order:

- `models`: shapes and flat buffers of real models;
- `processes`: ranks as local processes, with progress;
- `command_line`: arguments and exit statuses of all commands;
- `buffers`: `buffers`;
- `refit_bounds`: the least bytes that a refit could send;
- `refit_out`: files of arrived weights;
- `refit_rank`: a refit on one rank;
- `refit_report`: the tables that a refit prints;
- `demo`: sentence embeddings from arrived weights;
- `refit`: `refit`.
"""
