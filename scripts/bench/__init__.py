"""Benchmarks: k2convert, a plain copy and the published pipelines, on the same files in the same run."""
