"""Text of models, tasks, plug-ins and other machines, made so that it cannot act where people read it.

Invariant: what comes out moves no cursor, turns no text around and begins no line but at a line feed. Everything that
tables, screens and logs show of others passes here; imports nothing.
"""

_TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys((*range(0x80, 0xA0), *_TURNING), 0xFFFD) | dict.fromkeys((0x2028, 0x2029), 0x2424)
_ESCAPES = {code: f"\\u{code:04x}" for code in _PICTURES if code >= 0x7F}


def printable(text: str) -> str:
    """Return a text in which what would act on a screen is a picture: `␛` for an escape, `�` for what turns text."""
    return text.translate(_PICTURES)


def printable_json(document: str) -> str:
    """The same document, with what would act on a screen escaped: programs read the same values."""
    return document.translate(_ESCAPES)
