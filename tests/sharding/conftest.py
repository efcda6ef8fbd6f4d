"""What is in `eight/` needs eight devices, which a process must be given before JAX starts: `test_eight_devices.py` starts one that is."""

import os

collect_ignore = [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["eight"]
