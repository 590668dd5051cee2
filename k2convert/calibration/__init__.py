"""Calibration: the experts are converted with gptq in one pass over the layers, on a text.

smoothing                     the smoothing exponents of a layer, and what they are chosen by
gptq_pass, gptq_layer         rule `gptq`: both streams, layer by layer, and one layer's MLPs
layer_files                   what a layer pass keeps of each layer, and what a shard needs of it
conversion                    the layer pass next to the pipeline of a job: its plan, and its thread
memory                        counted before it starts
"""
