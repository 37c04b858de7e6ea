"""Escaping of control characters in untrusted text."""


def visible(text: str, keep: str = "") -> str:
    """The text with unprintable characters as Python escapes: `\\n`, `\\x1b`, `\\u202e`.

    It stays on its line and cannot colour or reorder its surroundings. Characters in `keep` are left unchanged.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
