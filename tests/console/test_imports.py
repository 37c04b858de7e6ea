"""The console's extra has no package of the agent service."""

import subprocess
import sys


def test_the_console_needs_no_agent_service() -> None:
    program = "import sys, trackway.console.app; print([name for name in sys.modules if name == 'trackway.agent'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert ended.stdout == "[]\n", ended.stderr
