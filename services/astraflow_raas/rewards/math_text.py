r"""What can be said of a mathematical answer by its text alone: its number, whether it is costly, its base, its unit.

Invariant: pure, and linear in the length of the text; nothing here computes what the text says. Used by `math_verify`,
whose library drops bases and units, misreads unbraced arguments, and computes whatever is asked of it.
"""

import re
from decimal import Decimal

_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"[+-]?([0-9]{1,60}\.?[0-9]{0,60}|\.[0-9]{1,60})")
_ARGUMENT = r"(\\[A-Za-z]+|[0-9A-Za-z])"
_REWRITES = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}"), r"\\frac{\1}{\2}"),
    (re.compile(rf"\\frac\s*{_ARGUMENT}\s*(?={{)"), r"\\frac{\1}"),
    (re.compile(rf"\\frac\s*({{[^{{}}]*}})\s*{_ARGUMENT}"), r"\\frac\1{\2}"),
    (re.compile(rf"\\sqrt\s*{_ARGUMENT}"), r"\\sqrt{\1}"),
    (re.compile(r"\\(left|right|!|,|;|:|quad)(?![A-Za-z])"), ""),
)
_PERCENT = re.compile(r"\\?%")
_BASE = re.compile(r"(?<![A-Za-z\\])[0-9][0-9A-Z]*_\{?([0-9]+|\\text\{\w+\})\}?")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{3,}([ -][^\W\d_]+)*")
_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm|textrm)\s*\{([^{}]*)\}\s*(?:\^\s*\{?\s*(\d+))?")
_POWER = re.compile(r"(?:\^|\*\*)\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\([^()]*\)|-?[\w.]+|\\\w+)")
_FACTORIAL = re.compile(r"([0-9]*)\s*([})\]]?)\s*!")
_REPEATED = re.compile(r"\\(?:sum|prod|int|lim|bigcup|binom|[dt]binom)(?![A-Za-z])")
_RAISED = re.compile(r"\^|\*\*|!")
_TIMES = re.compile(r"\\cdot|\\times|\*")
_MAX_FACTORIAL = 200
_MAX_IN_TOWER = 5
_MAX_EXPONENT = 1_000
_MAX_DIGITS = 60


def plain(text: str) -> str:
    """The text without what changes nothing: spaces, sizes of brackets, forms of fractions, a closing full stop."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", text).strip().removesuffix(".").strip("$ ")


def words_of(text: str) -> str | None:
    """The text as words, in small letters, when it is nothing but words: a name, a weekday."""
    bare = _TEXT.sub(r"\1", text).strip()
    return bare.casefold() if _WORDS.fullmatch(bare) else None


def number_of(text: str) -> Decimal | None:
    """The decimal number that the text is, dollar sign and grouping commas aside; None when it is something else."""
    bare = text.strip().removeprefix("\\$").removeprefix("$").replace("{,}", ",").replace(",\\!", ",").strip()
    if _GROUPED.fullmatch(bare):
        bare = bare.replace(",", "")
    return Decimal(bare) if _NUMBER.fullmatch(bare) else None


def without_percent(text: str, *, as_hundredths: bool) -> str:
    """The text without its percent sign, as hundredths or as the number that stands before the sign."""
    bare, num_signs = _PERCENT.subn("", text)
    if not num_signs or not as_hundredths:
        return bare
    number = number_of(bare)
    return str(number / 100) if number is not None else rf"\frac{{{bare.strip()}}}{{100}}"


def is_costly(text: str) -> bool:
    """Whether computing the text may take long: towers of powers, large factorials, sums, endless digits."""
    if _REPEATED.search(text) or re.search(rf"\d{{{_MAX_DIGITS + 1}}}", text):
        return True
    for digits, bracket in _FACTORIAL.findall(text):
        if bracket or int(digits or 0) > _MAX_FACTORIAL:
            return True
    if re.search(r"!\s*!", text):
        return True
    return any(_is_costly_power(found.group(1), text[found.end() :]) for found in _POWER.finditer(text))


def _is_costly_power(exponent: str, rest: str) -> bool:
    """Large numbers, products of several, and towers of more than two small ones."""
    numbers = [int(digits) for digits in re.findall(r"\d+", exponent)]
    is_tower = "!" in exponent or bool(_RAISED.search(exponent) or _RAISED.match(rest.lstrip("} )")))
    is_high = len(_RAISED.findall(exponent)) + len(_RAISED.findall(rest)) > 1
    if is_tower and (is_high or any(number > _MAX_IN_TOWER for number in numbers)):
        return True
    is_product = len(numbers) > 1 and bool(_TIMES.search(exponent))
    return is_product or any(number > _MAX_EXPONENT for number in numbers)


def differ_in_base_or_unit(text: str, other: str) -> bool:
    """Whether both name bases of numerals, or powers of units, and not the same ones."""
    bases = _BASE.findall(text), _BASE.findall(other)
    units = _units(text), _units(other)
    return any(bool(ours and theirs) and ours != theirs for ours, theirs in (bases, units))


def _units(text: str) -> list[str]:
    return [power for words, power in _UNIT_POWER.findall(text) if power]
