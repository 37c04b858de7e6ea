"""Text from outside, shown without control characters."""


def visible(text: str, keep: str = "") -> str:
    """The text with everything that does not print written as Python escapes it: `\\n`, `\\x1b`, `\\u202e`.

    So it stays in its line, and cannot colour or reorder what stands around it. The characters of `keep` are left.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
