"""A Harbor environment without Docker: commands run in bubblewrap, with folders of the trial at /app, /logs and so on.

Imported by Harbor's own process.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

FOLDERS = ("app", "logs", "tests", "tmp", "root", "solution")
SYSTEM = ("usr", "etc", "bin", "lib", "lib64", "sbin")


class BubblewrapEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "bubblewrap"

    def _validate_definition(self):
        pass

    def _place(self, path):
        return self.folder / str(path).lstrip("/")

    async def start(self, force_build):
        self.folder = Path(tempfile.mkdtemp(prefix="harbor-"))
        for name in (*FOLDERS, "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.folder / name).mkdir(exist_ok=True)

    async def stop(self, delete):
        await self.exec("tmux kill-server")
        shutil.rmtree(self.folder, ignore_errors=True)

    async def upload_file(self, source_path, target_path):
        self._place(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._place(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._place(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._place(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._place(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        own = [part for name in FOLDERS for part in ("--bind", str(self.folder / name), f"/{name}")]
        system = [part for name in SYSTEM for part in ("--ro-bind-try", f"/{name}", f"/{name}")]
        sandbox = ["bwrap", "--unshare-user-try", *system, "--proc", "/proc", "--dev", "/dev", *own]
        process = await asyncio.create_subprocess_exec(
            *(*sandbox, "--chdir", cwd or "/app", "bash", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": "/root",
                "TERM": "xterm",
                "LANG": "C.UTF-8",
                **(env or {}),
            },
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        except TimeoutError:
            process.kill()
            return ExecResult(stdout="", stderr="timed out", return_code=124)
        return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode)
