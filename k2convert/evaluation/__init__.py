"""Distance of a whole model from a reference, on a text.

    scores       divergences and losses of single tokens -> the figures of an evaluation
    checkpoints  what can be computed, and whether checkpoints compare
    plan         a planned evaluation, the origins of its rows, and the file that gets them
    streamed     models computed from checkpoints, layer by layer (`k2convert evaluate`), beside the reference
    head         the output matrix in tiles

The document is that of records/evaluation.py.
"""
