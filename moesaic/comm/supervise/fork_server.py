"""For the fork server alone, which imports it first: die with the supervisor, whatever happens.

The kernel kills the fork server when the supervisor ends, and each rank when the fork server ends:
that reaches ranks that are stopped or stuck, too. An import is the only way to run something in the
fork server of the standard library; anywhere else it does nothing.
"""

import os
import signal
from typing import Final

from moesaic.comm.supervise.child_process import die_with_parent, name_process

SUPERVISOR: Final = "MOESAIC_SUPERVISOR_PID"

if os.environ.get(SUPERVISOR) == str(os.getppid()):
    die_with_parent()
    name_process("moesaic-forks")
    # Sent to a whole group of processes it is for the supervisor, which ends the others in order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
