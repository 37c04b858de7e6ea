"""The tokens of the session's deployment: an agent's and an operator's."""

import json
from pathlib import Path

AGENT, OPERATOR = "agent-0123456789abcdef", "operator-0123456789abcdef"


def tokens_file(folder: Path) -> Path:
    """The file that `--tokens-file` names."""
    file = folder / "tokens.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps({"agents": {"secret": AGENT}, "ops": {"secret": OPERATOR, "scopes": ["admin"]}}))
    return file
