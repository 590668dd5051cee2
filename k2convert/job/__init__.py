"""A run, step by step.

locations     where a job reads and writes
prepare       plan the job, check destination and room; plan a calibration
resources     devices, threads, memory, disk
run           THE executor, and a part of a job
pipeline      the stages, overlapping
transfers     the stages with the Hub: fetch and upload
shard         THE per-shard function
ray           the convert stage on the nodes of a cluster, and its folder on a node
assemble      index, configs, sidecars, ledger
publish       validation, card, report, one commit on main
"""
