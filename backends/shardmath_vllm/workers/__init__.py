"""Workers: vLLM's end of transfers; all that imports vLLM, except the plugin.

In reading order:

- `answers`: what vLLM leaves unread of workers' answers;
- `caches`: what was computed with old weights goes as new ones come;
- `repacking`: what vLLM packs once on a CPU, and has to pack again;
- `biases`: those that vLLM has made wider than they are loaded;
- `loading`: a running model as it is loaded, and back;
- `coverage`: whether an update writes everything;
- `reducing`: workers that quantize together, and one that fails;
- `refusing`: models that an update has left torn;
- `worker`: the weight-transfer engine of a worker;
- `supplying`: a trainer's tensors for vLLM's own backends.
"""
