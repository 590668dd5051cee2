"""Calibration: what activations say about a checkpoint, as one file, and what a conversion takes from it. With
feedback, the experts are converted in the same walk.

tokenizers, chat, chat_process   a source's own tokenizer and chat template, without running its code
documents, text                  texts and token ids as windows
cost, walk, work                 the pass over the layers, and the folder that an interrupted one goes on from
accumulate                       one layer's statistics, summed while it runs
scaled_tensors, norm_scaling     the exponents of norm scaling
layer_statistics, statistics     the file
columns                          importance and exponents for a conversion
feedback_walk, feedback_tokens   the walk of rule `feedback`: both streams, layer by layer
feedback_layer                   one layer's experts, converted so that it gives what the INT4 layer gives
feedback_work, layer_codes       what an interrupted walk goes on from, and what its shards take
"""
