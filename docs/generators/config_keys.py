"""The page of a run's configuration keys."""

import json
from collections import defaultdict

from generators.markdown import breakable, code, page, sentence, table
from trackway.run_config import Explanation, explain
from trackway.run_config.unsupported_keys import DEPLOYMENT, MOVED, NO_EFFECT, ONLY, OTHERS


def configuration_keys() -> str:
    """Every key by section with its default and meaning; then those that moved, and those without effect."""
    sections: dict[str, list[Explanation]] = defaultdict(list)
    for key in explain():
        if key.honoured:
            sections[_section(key.key)].append(key)
    return page(
        "Configuration keys",
        "The keys of a training run, in verl's names; keys of Trackway's own begin with `trackway.`. Give them to "
        "`trackway train` or `python -m trackway.main_ppo` as `key=value`, or in a YAML file. An unknown key is an "
        "error that names the nearest one. `trackway config explain KEY` prints one row of this page.",
        "Keys marked *deployment* decide how `python -m trackway.main_ppo` deploys the services; they do not change "
        "services that run already.",
        *(f"## `{section}`\n\n{_honoured(keys)}" for section, keys in sections.items()),
        "## Moved",
        "Old spellings, read as the new key.",
        table(("Old key", "New key"), ((breakable(old), breakable(new)) for old, new in MOVED.items())),
        "## Refused but for one value",
        "Keys of verl that would change what is trained. They are accepted with the value that Trackway has anyway. "
        "With another one that verl has, a run is refused; a dry run lists it, and plans without it.",
        table(
            ("Key", "Accepted", "Otherwise"),
            ((breakable(key), code(only.allowed), sentence(only.remedy)) for key, only in ONLY.items()),
        ),
        "## Refused values",
        "Values of verl that keys with an effect do not have here; the same holds for them.",
        table(
            ("Key", "Refused", "Instead"),
            (
                (
                    breakable(key),
                    code(" or ".join(other.values)),
                    sentence(f"expected {other.expected}; {other.remedy}"),
                )
                for key, other in OTHERS.items()
            ),
        ),
        "## Without effect",
        "Keys of verl that are accepted so that its command lines run unchanged. A name that ends in `.*` stands for "
        "everything below it. Those that a run was given are listed, with the reason, when it starts.",
        table(("Key", "Reason"), ((breakable(key), sentence(reason)) for key, reason in NO_EFFECT.items())),
    )


def _section(key: str) -> str:
    parts = key.split(".")
    return ".".join(parts[: 2 if parts[0] == "actor_rollout_ref" else 1])


def _honoured(keys: list[Explanation]) -> str:
    rows = [
        (
            breakable(key.key),
            code(json.dumps(key.default)),
            sentence(key.meaning) + (" *(deployment)*" if key.key in DEPLOYMENT else ""),
        )
        for key in keys
    ]
    return table(("Key", "Default", "Meaning"), rows)
