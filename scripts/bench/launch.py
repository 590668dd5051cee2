"""Runs a command and prints its wall and CPU seconds and peak RSS as JSON: `python -S launch.py COMMAND...`.

This is a separate small process because the system counts a child's peak from the size of its parent.
"""

import json
import os
import subprocess
import sys
import time

begin = time.monotonic()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.monotonic() - begin
cpu_seconds = usage.ru_utime + usage.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss": usage.ru_maxrss * 1024}))
sys.exit(os.waitstatus_to_exitcode(status))
