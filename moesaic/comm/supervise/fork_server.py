"""The fork server imports this module first, to end with the supervisor in every case.

The kernel kills the fork server when the supervisor ends, and each rank when the fork server ends,
even if it is stopped or stuck. An import is the only way to run code in the fork server of the
standard library; in other processes it does nothing.
"""

import os
import signal
from typing import Final

from moesaic.comm.supervise.child_process import die_with_parent, name_process

SUPERVISOR: Final = "MOESAIC_SUPERVISOR_PID"

if os.environ.get(SUPERVISOR) == str(os.getppid()):
    die_with_parent()
    name_process("moesaic-forks")
    # A signal to the process group is for the supervisor, which ends the others in order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
