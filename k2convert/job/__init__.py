"""What a run does, in order.

places     where a job reads and writes
spelling   what is no place, and what was probably meant
prepare    plan the job, check destination and room; links: none in the way of what will be written
machine    devices, threads, memory; room: disk
execute    THE executor
verify     do finished shards have their recorded bytes
pipeline   the stages, overlapping
downloads  the fetch stage
shard      THE per-shard function
uploads    the upload stage
assemble   index, configs, sidecars, ledger
publish    validation, card, report, one commit on main
"""
