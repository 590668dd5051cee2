"""How far a whole model is from a reference on a text.

    scores      divergences and losses of single tokens -> the figures of an evaluation
    streamed    models computed from checkpoints, layer by layer, side by side (`k2convert evaluate`)
    served      models asked through two servers (`k2convert compare`)
    connection  requests to one server; its API key
    endpoints   how vLLM and SGLang are asked, and how they answer
    answers     what a server answered, and the folder that keeps it
    bound       a lower bound of the divergence, from the most likely tokens

The document is that of records/evaluation.py.
"""
