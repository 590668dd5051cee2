"""What a run does, in order.

places     where a job reads and writes
spelling   what is no place, and what was probably meant
prepare    plan the job, check destination and room; links: none in the way of what will be written
calibration  the recipe with statistics or a text; scaling: what statistics change in one tensor
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
