r"""Numbers: reads an answer or a label as one number and compares the two. In: texts. Out: a
Number; a yes or no.

A text is a number when it is one of these and nothing else (rewards.answers.markup has been taken
off):

    42   -42   +42   042   42.0   .5   1,234   1{,}234   1\,234      thousands in groups of three,
                                                                      all or none.
    1.6e-19   1.6 × 10^-19                                          a mantissa from 1 to under 10
                                                                    before ×.
    3/4   3 / 4   \frac{3}{4}   1 1/2   1\frac{1}{2}                 whole parts; the mixed one
                                                                       with a proper fraction.
    3 million                                                       hundred, thousand, million,
                                                                    billion, trillion.
    42%   42 percent                                                with none of what follows.
    $42   -$42   USD 42   42 km   42 km/h   42 cm^2   42 apples       one currency before it or one
                                                                      unit (see units.py).
    x = 42                                                          one letter, and the question
                                                                    names it.

So no expression, equation, chain, date, list, interval, ± or "about". docs/rewards.md has the rules
of `same_number` in a table. Exponents have three digits and texts 1,000 characters at most: reading
is always quick.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from gyre.rewards.answers.markup import ascii_width, bare
from gyre.rewards.answers.units import Unit, contradicts, read_unit

# 0.5, 5e-1, 5 × 10^-1, 1/2, 3 million
Form = Literal["plain", "exponent", "power", "fraction", "scaled"]

WHOLE = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+"
DECIMAL = rf"(?:(?:{WHOLE})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
_TIMES_TEN = r" ?(?:×|\\times|\\cdot|\*|x) ?10 ?\^ ?(?:\{([-+]?[0-9]{1,3})\}|([-+]?[0-9]{1,3}))"
_FRAC = r"\\[dtc]?frac ?(?:\{([-+]?[0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9]))"
_PATTERNS: tuple[tuple[Form, re.Pattern[str]], ...] = (
    ("power", re.compile(rf"([1-9](?:\.[0-9]*)?){_TIMES_TEN}")),
    ("fraction", re.compile(rf"(?:([0-9]+) ?)?{_FRAC}")),
    ("fraction", re.compile(r"(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)")),
    ("plain", re.compile(rf"({DECIMAL})")),
)
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_BEFORE = re.compile(
    r"([-+]?) ?(?:(US\$|[$€£¥₹]) ?|(USD|EUR|GBP|INR|JPY|CNY) )?([-+]?) ?(?=[0-9.\\])"
)
_SCALE = re.compile(rf" ({'|'.join(SCALES)})(?![A-Za-z])", re.IGNORECASE)
_PERCENT = re.compile(r" ?%| (?:percent|per cent)", re.IGNORECASE)
_ASKS_PERCENT = re.compile(r"%|\bper ?cent", re.IGNORECASE)
_NAMED = re.compile(r"([A-Za-z]) ?= ?(?=[^=])")
_LONGEST = 1000  # characters
_FINEST_DECIMALS = 6  # of a label; past them its digits are a float's rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenNumber:
    """One number as it was written."""

    value: Fraction  # of "5%": 5
    form: Form
    written: str  # its digits, without sign, percent sign and unit
    # places after the point that the digits reach, the exponent counted in; 0 for a fraction
    decimals: int
    in_lowest_terms: bool = True
    percent: bool = False
    unit: Unit | None = None

    @property
    def is_whole(self) -> bool:
        return self.value.denominator == 1


def read_number(text: str, question: str = "", *, lead_in: bool = True) -> WrittenNumber | None:
    """Read one number that fills the text, or return None. `lead_in` False: "The answer is 42" is
    none (labels)."""
    if len(text) > _LONGEST:
        return None
    text = _ascii_latex(bare(text, lead_in=lead_in))
    named = _NAMED.match(text)
    if named and lead_in and re.search(rf"(?<![A-Za-z]){named[1]}(?![A-Za-z])", question):
        text = text[named.end() :]
    before = _BEFORE.match(text)
    if before is None or (before[1] and before[4]):
        return None
    for form, pattern in _PATTERNS:
        found = pattern.match(text, before.end())
        if found:
            number = _value(form, found)
            sign = -1 if "-" in (before[1], before[4]) else 1
            currency = before[2] or before[3] or ""
            return (
                None
                if number is None
                else _finish(number, sign, currency, text[found.end() :], question)
            )
    return None


def _ascii_latex(text: str) -> str:
    """Spell thousands, spaces, signs and degrees of LaTeX in plain characters."""
    text = re.sub(r"(?<=[0-9])(?:\{,\}|\\,|[\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ",", text)
    text = (
        re.sub(r"\^\{?\\circ\}?|\\degree", "°", text)
        .replace("\\$", "$")
        .replace("\\%", "%")
        .replace("\\!", "")
    )
    text = re.sub(r"\\(?:text|mathrm|mbox) ?\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"^(\*\*|\$)([^*$]+)\1(?= )", r"\2", text)  # **42** apples
    return " ".join(re.sub(r"\\[,;: ]|(?<=[0-9])~(?=[A-Za-z\\])", " ", text).split())


def _value(form: Form, found: re.Match[str]) -> WrittenNumber | None:
    """Return the number without sign and unit from a pattern's groups; None for a zero below the
    line and the like."""
    parts = [part for part in found.groups() if part is not None]
    if form == "fraction":
        mixed = found[1] is not None
        whole = int(parts.pop(0)) if mixed else 0
        above, below = int(parts[0]), int(parts[1])
        if below == 0 or (mixed and not 0 < above < below):
            return None
        lowest = math.gcd(above, below) == 1
        value = whole + Fraction(above, below)
        return WrittenNumber(
            value=value, form=form, written=found[0], decimals=0, in_lowest_terms=lowest
        )
    digits, _, exponent = parts[0].replace(",", "").lower().partition("e")
    power = int(exponent or 0) + (int(parts[1]) if form == "power" else 0)
    decimals = len(digits.partition(".")[2]) - power
    form = "exponent" if exponent else form
    value = Fraction(digits) * Fraction(10) ** power
    return WrittenNumber(value=value, form=form, written=found[0], decimals=max(decimals, 0))


def _finish(
    number: WrittenNumber, sign: int, currency: str, rest: str, question: str
) -> WrittenNumber | None:
    """Add sign, scale, percent sign and unit; None when what follows the number is none of them."""
    scale = _SCALE.match(rest)
    if scale and number.form == "plain":
        number, rest = _scaled(number, scale[0]), rest[scale.end() :]
    number = replace(number, value=sign * number.value)
    percent = None if currency else _PERCENT.match(rest)
    if percent:
        return replace(number, percent=True) if percent.end() == len(rest) else None
    before = read_unit(currency, question) if currency else None
    if not rest:
        return replace(number, unit=before)
    apart = rest.startswith(" ")  # a word stands apart from its number; a listed unit may touch it
    unit = read_unit(rest.strip(), question if apart else "")
    if unit is None or (unit.is_word and not apart) or (before is not None and unit != before):
        return None
    return replace(number, unit=unit)


def _scaled(number: WrittenNumber, scale: str) -> WrittenNumber:
    factor = SCALES[scale.strip().casefold()]
    decimals = max(number.decimals - len(str(factor)) + 1, 0)
    written = number.written + scale
    return replace(
        number, value=number.value * factor, form="scaled", decimals=decimals, written=written
    )


def same_number(
    ours: WrittenNumber, theirs: WrittenNumber, *, tolerance: float, question: str = ""
) -> bool:
    """Compare an answer with the label. tolerance: relative, for labels that are not whole; see
    docs/rewards.md."""
    if ours.unit is not None and not _unit_fits(ours.unit, theirs, question):
        return False
    if theirs.percent and not ours.percent:  # "5" or "0.05" for "5%"
        return _equal(ours, theirs, tolerance, question) or _equal(
            ours, theirs, tolerance, question, factor=100
        )
    if ours.percent and not theirs.percent:
        if theirs.unit is not None or not _ASKS_PERCENT.search(ascii_width(question)):
            return False
        factor = Fraction(1, 100) if 0 < abs(theirs.value) < 1 else Fraction(1)
        return _equal(ours, theirs, tolerance, question, factor=factor)
    return _equal(ours, theirs, tolerance, question)


def _unit_fits(unit: Unit, theirs: WrittenNumber, question: str) -> bool:
    if theirs.unit is not None:
        return unit == theirs.unit
    return not theirs.percent and not contradicts(unit, question)


def _equal(
    ours: WrittenNumber,
    theirs: WrittenNumber,
    tolerance: float,
    question: str,
    *,
    factor: Fraction | int = 1,
) -> bool:
    """Compare `factor` times the answer with the label, in the label's digits."""
    if ours.form == "power" and theirs.form not in ("power", "exponent"):
        return False
    if ours.form == "fraction" and not ours.in_lowest_terms:
        return False
    if ours.form == "fraction" and theirs.form != "fraction" and theirs.is_whole and factor == 1:
        return False
    if (ours.form != theirs.form or factor != 1) and _is_shown(ours, question):
        return False
    value = ours.value * factor
    if theirs.is_whole:
        return value == theirs.value
    room = Fraction(str(tolerance)) * max(abs(value), abs(theirs.value))
    if theirs.form != "fraction":
        room = min(room, Fraction(1, 2 * 10 ** min(theirs.decimals, _FINEST_DECIMALS)))
    return abs(value - theirs.value) <= room


def _is_shown(number: WrittenNumber, question: str) -> bool:
    """Check that the question has the number as the answer writes it, a fraction in any
    spelling."""
    wanted = [re.escape(number.written)]
    if number.form == "fraction":
        above, below = abs(number.value.numerator), number.value.denominator
        wanted += [f"{above} ?/ ?{below}", rf"frac ?\{{?{above}\}}?\{{?{below}\}}?"]
    text = _ascii_latex(ascii_width(question))
    return any(re.search(rf"(?<![0-9.]){one}(?![0-9]|\.[0-9])", text) for one in wanted)
