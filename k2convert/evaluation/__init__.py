"""Distance of a whole model from a reference, on a text.

    scores       divergences and losses of single tokens -> the figures of an evaluation
    checkpoints  what can be computed, and whether checkpoints compare
    streamed     models computed from checkpoints, layer by layer (`k2convert evaluate`)
    comparison   one layer of every model against the reference's
    head         the output matrix in tiles
    served       models asked through two servers (`k2convert compare`)
    connection   requests to one server; its API key
    endpoints    how vLLM and SGLang are asked, and how they answer
    answers      what a server answered, and the folder that keeps it
    bound        a lower bound of the divergence, from the most likely tokens

The document is that of records/evaluation.py.
"""
