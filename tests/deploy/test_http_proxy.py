"""Ray Serve's proxy ends at SIGTERM, whatever handler Ray has set in its main thread."""

import signal
import subprocess
import sys

PROXY = """
import signal, threading, time
signal.signal(signal.SIGTERM, lambda *_: print("Ray's handler", flush=True))
from trackway.deploy.http_proxy import bound_connections
thread = threading.Thread(target=bound_connections)
thread.start()
thread.join()
print("listening", flush=True)
time.sleep(30)
"""


def test_sigterm_ends_the_proxy_at_once():
    with subprocess.Popen([sys.executable, "-c", PROXY], stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        assert proxy.stdout.readline() == "listening\n"
        proxy.send_signal(signal.SIGTERM)
        said, _ = proxy.communicate(timeout=10)

    assert (proxy.returncode, said) == (-signal.SIGTERM, "")
