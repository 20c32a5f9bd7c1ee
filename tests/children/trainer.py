"""A child process that stands for the trainer in the tests of supervision: `TRAINER` says what it does.

It is no verl; tests with the real one are marked slow.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

script = os.environ["TRAINER"]
print("argv:", sys.argv[1:], flush=True)
if "metrics" in script:
    data = {"critic/rewards/mean": 0.5, "timing_s/step": 1.0}
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2)]
    Path(os.environ["VERL_FILE_LOGGER_PATH"]).write_text("".join(lines))
if "child" in script:  # one that leaves our session and hides, as Ray's daemons do
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if "deaf" in script:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "sleep" in script:
    time.sleep(600)
if "raise" in script:
    raise RuntimeError("reward function broke on <b>& $(x)")
if "die" in script:
    os.kill(os.getpid(), signal.SIGKILL)
if "exit3" in script:
    sys.exit(3)
