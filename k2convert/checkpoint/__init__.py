"""Safetensors shards and checkpoint folders: reading, writing, names, and the files that declare NVFP4.

names       every file and folder name
folders     new files and folders, created and synced
files       JSON read strictly, small files written atomically
header      one shard's header
index       a folder's index, config and headers together; sidecars: tokenizer, template, license
reader      tensor bytes by positioned reads
writer      one shard written atomically
layouts     the NVFP4 layouts, a file each: tensor names, dtypes, shapes, configs, exclude lists, notes
"""
