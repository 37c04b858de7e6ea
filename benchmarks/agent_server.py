"""Runs a script of examples/agents for each POST, unchanged, in a process that begins with its packages imported.

    PYTHON benchmarks/agent_server.py PORT SCRIPT PACKAGE

The body is an ExternalRollout. Standard library only: PYTHON is that of the agent's own environment. Without this, the
import of the agent's packages, once for each rollout, would be most of what `learning.py agents` takes.
"""

import io
import json
import multiprocessing
import os
import runpy
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AGENT_S = 300.0
PROCESSES = multiprocessing.get_context("forkserver")


def run(script: str, row: str, variables: dict[str, str]) -> None:
    """The script as a program with this row and these variables."""
    os.environ.update(variables)
    sys.stdin = io.StringIO(row)
    runpy.run_path(script, run_name="__main__")


class Handler(BaseHTTPRequestHandler):
    """Answers `{}` when the script has ended well, else 500."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        rollout = json.loads(self.rfile.read(int(self.headers["content-length"])))
        base_url = rollout.get("direct_url") or rollout["base_url"]
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": rollout["api_key"]}
        agent = PROCESSES.Process(target=run, args=(sys.argv[2], json.dumps(rollout["sample"]), variables))
        agent.start()
        agent.join(AGENT_S)
        agent.kill()
        agent.join()
        self.send_response(200 if agent.exitcode == 0 else 500)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """As many rollouts at once as come."""

    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    PROCESSES.set_forkserver_preload([sys.argv[3]])
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
