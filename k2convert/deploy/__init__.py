"""Will it fit, how fast can it be at most, and how to serve it: answered from headers and config.json only.

    model    the counts of config.json, and the bytes of a checkpoint by role and layer, as it is or would be converted
    gpus     the GPUs that are known by name
    layouts  how GPUs share the work, and which layouts are possible
    memory   weights and KV cache of each GPU, for one layout, what it reads for a token, and which GPUs hold it all
    serving  the command that serves a checkpoint

Memory is computed from facts. The one assumption is the overhead of the engine, which is printed and can be set.
"""
