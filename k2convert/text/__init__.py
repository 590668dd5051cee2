"""Texts as windows of token ids.

tokenizers   a source's own tokenizer and chat template, in process
windows      texts and token ids, cut into windows that a seed draws
"""
