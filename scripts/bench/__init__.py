"""Benchmarks: k2convert beside a plain copy and beside the published pipelines, on the same files in the same run."""
