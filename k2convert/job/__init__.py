"""What a run does, in order.

places     where a job reads and writes
spelling   what is no place, and what was probably meant
prepare    plan the job, check destination and room; links: none in the way of what will be written
calibration  statistics: do they fit the source and the recipe; scaling: what they change in one tensor
layer_pass  a calibration: plan it, walk through the layers, write the statistics file; layer_shards: its fetch stage
feedback_plan  what a conversion with feedback takes; feedback: its walk, next to the pipeline
machine    devices, threads, memory; room: disk
kept_experts  which experts a job keeps
run        THE executor; parts: a share of the shards; verify: the shards of an earlier run
pipeline   the stages, overlapping
downloads  the fetch stage
ray        the convert stage on the nodes of a cluster
shard      THE per-shard function
uploads    the upload stage
assemble   index, configs, sidecars, ledger
publish    validation, card, report, one commit on main
"""
