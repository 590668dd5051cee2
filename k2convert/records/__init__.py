"""Records that a job leaves, typed, each read and written in one module.

fingerprint      everything that the bytes of a result depend on
document         JSON files as dataclasses that pydantic checks, and their checksum
journal          the records of one destination, its job description, and where it was published
work_log         the steps of unfinished work that are done, and the lock of its folder
calibration      what a result was calibrated with
ledger           k2convert.json, which travels with the result, and the record of one finished shard
events           what a running stage reports
"""
