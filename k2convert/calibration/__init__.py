"""Calibration: statistics of a checkpoint's activations, as one file, and what a conversion uses of them. With
gptq, the experts are converted in the same walk.

tokenizers, chat              a source's own tokenizer and chat template, in processes of their own
text                          texts and token ids as windows
plan                          a calibration, planned, with or without a conversion
accumulate                    a calibration, done: each layer's statistics, summed while it runs
smoothing                     choices by samples of tokens: exponents, and whether `imatrix` gained
statistics                    the file
layer_files                   what a walk keeps of each layer, and what it fetches for it
channels                      statistics for a conversion: do they fit, importance and exponents
gptq_walk, gptq_layer         rule `gptq`: both streams, layer by layer, and one layer's experts
conversion                    its walk, next to the pipeline of a job
memory                        counted before it starts
"""
