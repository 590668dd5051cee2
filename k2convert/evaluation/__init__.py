"""Distance of a whole model from a reference, on a text.

    scores       divergences and losses of single tokens -> the figures of an evaluation
    checkpoints  what can be computed, and whether checkpoints compare
    streamed     models computed from checkpoints, layer by layer (`k2convert evaluate`)
    comparison   one layer of every model against the reference's
    head         the output matrix in tiles

The document is that of records/evaluation.py.
"""
