"""Units: what may stand after the number of an answer. In: the words after it, the question. Out: a
Unit, or None.

A unit is a unit or currency of the list below, also as "km/h", "cm^2", "square meters", "miles per
hour". A word of the question ("42 sheep") and a plural of one word ("42 apples") are units as well.
Words that change the number ("dozen", "halves", "percent", "squared") or doubt it ("not", "or") are
none. Some plurals ("squares", "pairs") are units only of a question that has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LISTED = {
    "length": "mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer "
    "kilometre; inch inches; "
    "foot feet ft; yard yd; mile mi",
    "time": "ms millisecond; s sec second; min minute; h hr hour; day; week; month; year yr",
    "mass": "mg milligram; g gram; kg kilogram; lb; oz ounce; ton; tonne",
    "money": "USD dollar $ US$; cent ¢; EUR euro €; GBP £; INR rupee ₹; JPY yen ¥; CNY yuan",
    "volume": "ml mL milliliter millilitre; l L liter litre; gallon gal",
    "speed": "mph; kph",
    "angle": "° degree deg; rad radian",
    "temperature": "°C celsius; °F fahrenheit; kelvin",
    "energy": "J joule; kJ; cal calorie; kcal; kWh",
    "other": "N newton; W watt; kW; V volt; Hz hertz; Pa; mol mole; pound; person people; child "
    "children; man men; "
    "woman women",
}
_UNITS = {
    word: (dimension, group.split()[0])
    for dimension, groups in _LISTED.items()
    for group in groups.split(";")
    for word in group.split()
}
_NO_UNIT_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty "
    "ninety "
    "twos threes fours fives sixes sevens eights "
    "nines tens hundred thousand million billion trillion dozen score gross lakh crore hundreds "
    "thousands "
    "millions billions trillions dozens scores double triple doubled tripled "
    "quadrupled halved square cube twice half third quarter fourth fifth halves "
    "thirds quarters fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths "
    "percent "
    "percents percentage percentages cent cents per point squared cubed factorial factorials root "
    "power "
    "powers plus minus mod modulo times divided multiplied over under not never wrong false "
    "incorrect and nor "
    "but less more least most fewer than about almost around nearly roughly approximately maybe "
    "perhaps "
    "possibly else other others even odd negative positive equals equal answer answers guess "
    "choose from into "
    "off out pi the with without either neither both all any some none what which how many much "
    "find for are "
    "was were yes below above "
)
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split())
_ONLY_IF_ASKED_WORDS = (
    "pairs couples squares cubes roots logs sins sines cosines factors multiples negatives "
    "opposites inverses "
    "reciprocals nots ands lakhs crores millones grands bits"
)
_ONLY_IF_ASKED = frozenset(_ONLY_IF_ASKED_WORDS.split())
_POWER = re.compile(r"(.+?)(?:\^\{?([23])\}?|([²³]))")
_AREA = re.compile(r"(square|sq|cubic) (.+)", re.IGNORECASE)
_ASKED = re.compile(r"\bhow (?:many|much) ([a-z]+)", re.IGNORECASE)
_SIGN_OR_LETTER = re.compile(r"(?<=[0-9]) ?([A-Za-z])(?![A-Za-z])|([A-Za-z]{2,})|([$€£¥₹¢°])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit in its first spelling of the list, or a word in the singular."""

    name: str
    dimension: str = ""  # of its base; "" for words and quotients
    is_word: bool = False  # not of the list


def read_unit(text: str, question: str) -> Unit | None:
    """Read a whole text as one unit, or return None."""
    text = " ".join(text.split())
    quotient = re.split(r" ?/ ?| per ", text)
    if len(quotient) == 2:
        parts = [_simple(part, question) for part in quotient]
        return Unit(name="/".join(part.name for part in parts if part)) if all(parts) else None
    return _simple(text, question)


def units_of(question: str) -> frozenset[tuple[str, str]]:
    """Return the listed units that a question names, as (dimension, name); those of one letter only
    after a digit."""
    found = (match[1] or match[2] or match[3] for match in _SIGN_OR_LETTER.finditer(question))
    return frozenset(unit for word in found if (unit := _listed(word)) is not None)


def contradicts(unit: Unit, question: str) -> bool:
    """Check that the question names units of this dimension without this one (cents for dollars).

    "How many hours" asks for that one, whatever other unit the question gives.
    """
    asked = {found for word in _ASKED.findall(question) if (found := _listed(word)) is not None}
    wanted = {name for dimension, name in asked if dimension == unit.dimension}
    named = wanted or {
        name for dimension, name in units_of(question) if dimension == unit.dimension
    }
    return bool(
        unit.dimension not in ("", "other") and named and unit.name.partition("^")[0] not in named
    )


def _simple(text: str, question: str) -> Unit | None:
    power, area = _POWER.fullmatch(text), _AREA.fullmatch(text)
    if area:
        text, exponent = area[2], "3" if area[1].casefold() == "cubic" else "2"
    elif power:
        text, exponent = power[1], power[2] or {"²": "2", "³": "3"}[power[3]]
    else:
        exponent = ""
    text = re.sub(r"degrees? (?=celsius|fahrenheit)", "", text.casefold()) if " " in text else text
    unit = _listed(text)
    if unit is not None:
        return Unit(name=f"{unit[1]}^{exponent}" if exponent else unit[1], dimension=unit[0])
    return None if exponent else _word(text, question)


def _listed(word: str) -> tuple[str, str] | None:
    """Look a word up. Those of one or two letters must be written as listed: "m" is the meter, "M"
    a million."""
    if len(word) <= 2:
        return _UNITS.get(word)
    for form in (word, word.upper(), word.casefold(), word.casefold().removesuffix("s")):
        if form in _UNITS and len(form) > 2:
            return _UNITS[form]
    return None


def _word(text: str, question: str) -> Unit | None:
    word = text.casefold()
    if not re.fullmatch(r"[a-z]{3,20}", word) or word in _NO_UNITS:
        return None
    in_question = re.search(rf"(?<![a-z]){word}s?(?![a-z])", question.casefold()) is not None
    is_plural = (
        len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is", "ths"))
    )
    fits = in_question or (is_plural and word not in _ONLY_IF_ASKED)
    return Unit(name=word.removesuffix("s"), is_word=True) if fits else None
