"""The process of a learner's rank: `python -m trackway.learner.ranks.process INDEX HOST PORT SETTINGS PARENT`.

It exits with its parent, the process of the first rank or the actor of its node. The exit status is 0 after the
command to stop, EXIT_PEER_LOST after a failed collective, and any other status after a failure of this rank. The
traceback is on standard error.
"""

import argparse
import ctypes
import logging
import os
import signal
import sys

from trackway.learner.gpu_memory import with_advice
from trackway.learner.ranks.group import EXIT_PEER_LOST, SETTINGS, is_of_group, serve
from trackway.system import escape_log_records

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve the first rank. Return the exit status."""
    parser = argparse.ArgumentParser(prog="trackway.learner.ranks.process", description="One rank of a learner.")
    parser.add_argument("index", type=int)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("settings", type=SETTINGS.validate_json)
    parser.add_argument("parent", type=int)
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.parent:  # it ended before the line above
        return EXIT_PEER_LOST
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends the others
    escape_log_records()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(options.index, options.host, options.port, options.settings)
    except Exception as error:
        if not is_of_group(error):
            with_advice(error, options.settings.config, options.settings.placement)
            raise
        logging.getLogger("trackway.trainer").exception("rank %d: a collective failed", options.index)
        return EXIT_PEER_LOST
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that needs the interpreter while it ends would abort the process: "terminate called without an
    # active exception", and SIGABRT instead of the status.
    os._exit(status)
