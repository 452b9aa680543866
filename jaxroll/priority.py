"""Who waits where the processes of a run share a machine's cores: on a CPU all give way to the learner.

In the end the learner is what the others wait for: samplers are as far ahead of it as the age limit allows, and what
it computes a moment sooner lets them go on sooner. A learner that waits itself takes nothing from anybody.

Linux may schedule every session as one group (sched(7), autogroup), beside which a process's own priority is nothing.
So a process that leads a session lowers its group too, as do the workers that it starts in sessions of their own.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path

from jaxroll.errors import ConfigError

NICE_ENV = "JAXROLL_NICE"
NICE = 10
LOWEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")
_LIMIT_S, _PAUSE_S = 5.0, 0.2  # of all users but root the kernel takes one such word in a tenth of a second


def give_way(environ: Mapping[str, str] = os.environ, autogroup: Path = _AUTOGROUP) -> bool:
    """Lower this process to what `environ` asks for, and its session like it; without that nothing happens.

    Early: threads that there are already keep their own priority. False when the session could not be lowered because
    too many asked for that at once. ConfigError for what is no priority.
    """
    given = environ.get(NICE_ENV) or "0"
    if not given.isdecimal() or (wanted := int(given)) > LOWEST:
        raise ConfigError(NICE_ENV, given, f"a priority is a number from 0 to {LOWEST}", "Unset it, or use 10.")
    if wanted == 0:
        return True
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(wanted, os.getpriority(os.PRIO_PROCESS, 0)))
    return lower_session(autogroup)


def lower_session(autogroup: Path = _AUTOGROUP) -> bool:
    """Lower the session that this process leads, if it does, to the process's own priority; False as `give_way`."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own <= 0 or os.getsid(0) != os.getpid():
        return True  # nothing to lower, or the session is somebody else's
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            autogroup.write_text(str(own), encoding="utf-8")
        except BlockingIOError:
            time.sleep(_PAUSE_S * random.random())
        except OSError:
            return True  # no such kernel: the priority alone counts
        else:
            return True
    return False
