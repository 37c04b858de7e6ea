"""The interpreter within the sandbox: reads cells of code from a socket, runs them, and reports when each is done.

Output of a cell goes to stdout immediately, as do its last expression's value and its traceback. Runs as
`python -c <this file>` from another Python, so it may use only the standard library.
"""

import ast
import builtins
import io
import json
import linecache
import os
import resource
import struct
import sys
import traceback
import types

# Cells may replace builtins; what is defined below keeps these.
globals()["__builtins__"] = dict(vars(builtins))

READY = b"python is ready."
"""The token of the first message."""
BROKEN = 70
"""Exit status when a cell closed or replaced what the interpreter needs to answer."""


def confine(limits: "dict[str, tuple[int, int]]", user: "int | None") -> None:
    """Set every limit and become `user`. Afterwards no limit can be raised."""
    os.nice(5)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    for name, bounds in limits.items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        soft, hard = (bound if most == resource.RLIM_INFINITY else min(bound, most) for bound in bounds)
        resource.setrlimit(kind, (soft, hard))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def fresh_output() -> io.TextIOWrapper:
    """One stream for stdout and stderr, so that their order is kept. Cells may have closed or replaced the last."""
    sys.stdout = sys.stderr = out = open(  # noqa: SIM115
        1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    return out


class Cells:
    """The cells of a session, and their shared module."""

    def __init__(self) -> None:
        self._count = 0
        self._process = os.getpid()
        self._module = types.ModuleType("__main__")
        vars(self._module)["__builtins__"] = builtins
        sys.modules["__main__"] = self._module

    def run(self, code: str) -> bool:
        """Run one cell. False when it raised."""
        self._count += 1
        out = fresh_output()
        try:
            self._execute(code, f"<cell {self._count}>")
            succeeded = True
        except BaseException as error:
            if isinstance(error, SystemExit) and os.getpid() != self._process:
                os._exit(error.code if isinstance(error.code, int) else 0)
            succeeded = False
            out = fresh_output() if out.closed else out
            out.write(report(error))
        if not out.closed:
            out.flush()
        if os.getpid() != self._process:
            os._exit(0 if succeeded else 1)  # a fork that reached the end of its cell is not the interpreter
        return succeeded

    def _execute(self, code: str, name: str) -> None:
        linecache.cache[name] = (len(code), None, [f"{line}\n" for line in code.split("\n")], name)
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        last = tree.body[-1] if tree.body else None
        namespace = vars(self._module)
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
            if value is not None:
                namespace["_"] = value
                sys.stdout.write(f"{value!r}\n")


def report(error: BaseException) -> str:
    """The traceback, or the error's name alone when it cannot be made: cells can break what it needs."""
    try:
        return short_traceback(error)
    except BaseException:
        return f"{type(error).__name__}\n"


def short_traceback(error: BaseException) -> str:
    """The frames of the cells and the innermost one, with paths as they are imported."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    summary = traceback.TracebackException(type(error), error, frames, compact=True)
    links = [summary]
    for link in links:
        links.extend(other for other in (link.__cause__, link.__context__) if other is not None)
        last = len(link.stack) - 1
        kept = [frame for at, frame in enumerate(link.stack) if at == last or frame.filename.startswith("<cell ")]
        link.stack[:] = kept
    text = "".join(summary.format())
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


def answer_for_ever(channel: int) -> None:
    """Serve requests: a length, a token of 16 bytes and code of that length. The reply is the token and y or n."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = os.read(channel, size - len(data))
            if not more:
                os._exit(0)  # the service has exited
            data += more
        return data

    cells = Cells()
    os.write(channel, READY + b"y")
    while True:
        (length,) = struct.unpack(">I", read(4))
        token = read(16)
        succeeded = cells.run(read(length).decode("utf-8", "surrogatepass"))
        os.write(channel, token + (b"y" if succeeded else b"n"))


def main() -> None:
    """Read the setup from the command line, then serve requests until the channel closes."""
    setup = json.loads(sys.argv[1])
    sys.argv = [""]
    sys.path.insert(0, os.getcwd())
    builtins.exit = builtins.quit = sys.exit
    confine(setup["limits"], setup["user"])
    try:
        answer_for_ever(setup["channel"])
    except BaseException:
        os._exit(BROKEN)


if __name__ == "__main__":
    main()
