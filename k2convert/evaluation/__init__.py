"""How far a whole model is from a reference on a text.

    scores      divergences and losses of single tokens -> the figures of an evaluation
    streamed    models computed from checkpoints, layer by layer, side by side (`k2convert evaluate`)
    served      models asked through two servers (`k2convert compare`)

The document is that of records/evaluation.py.
"""
