"""Answer matcher: what is found, how it is compared, and the four outcomes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rewards.answers.answer import clean_label, compare, extract, match_answer
from gyre.rewards.answers.numbers import read_number
from gyre.rewards.checks import Tools, build_check
from gyre.rewards.config import AnswerPart
from gyre.rewards.messages import Item

FORMS = ("tag", "boxed", "hash")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>2</think><answer> 42 </answer>", "42"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1</answer> no: <answer>2", None),  # the last one has no end
        ("<answer></answer>", None),
        (r"<answer>so \boxed{7}</answer>", "7"),
        (r"so \boxed{\frac{1}{2}} then \boxed{\frac{3}{\sqrt{2}}}", r"\frac{3}{\sqrt{2}}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", None),
        (r"\fbox{a}", "a"),
        ("7 + 3 = 10\n#### 10\nDone", "10"),
        ("#### 1,234", "1,234"),
        ("the answer is 5", None),
    ],
)
def test_finds_the_last_answer(text, found):
    assert extract(text, FORMS) == found


def test_forms_are_a_choice():
    assert extract(r"<answer>1</answer> \boxed{2}", ("boxed",)) == "2"
    assert extract(r"<answer>1</answer> \boxed{2}", ("tag", "boxed")) == "1"
    assert extract("first 3, then 1,250.5 apples", ("number",)) == "1,250.5"
    assert extract("it falls by 50 %.", ("number",)) == "50 %"
    assert extract("9-7", ("number",)) == "7" and extract("so -7.", ("number",)) == "-7"
    assert extract("  yes ", ("plain",)) == "yes"


braces = st.recursive(
    st.text("ab1+", max_size=4),
    lambda inner: st.builds(lambda a, b, c: f"{a}{{{b}}}{c}", inner, inner, inner),
    max_leaves=8,
)


@given(inside=braces, before=st.text("xy{} ", max_size=6), after=st.text("xy ", max_size=6))
def test_box_gives_back_any_balanced_content(inside, before, after):
    assert extract(f"{before}\\boxed{{{inside}}}{after}", ("boxed",)) == (inside.strip() or None)


@given(st.text(max_size=80))
def test_extraction_never_raises(text):
    for form in ("tag", "boxed", "hash", "number", "plain"):
        extract(text, (form,))
    extract("\\boxed{" + text, FORMS)
    read_number(text, text)
    compare(text, "B", how="auto", question=text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        ("-3", Fraction(-3)),
        ("−3", Fraction(-3)),
        ("1,234,567", Fraction(1234567)),
        ("1{,}234", Fraction(1234)),
        ("12,34", None),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac34", Fraction(3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("1/0", None),
        ("$0.50", Fraction(1, 2)),
        ("75\\%", Fraction(75)),
        (".5", Fraction(1, 2)),
        ("2.", Fraction(2)),
        ("1e3", Fraction(1000)),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("x", None),
        ("", None),
        ("1 2", None),
    ],
)
def test_reads_numbers(text, value):
    number = read_number(text)
    assert (number.value if number else None) == value


@given(numerator=st.integers(-(10**9), 10**9), denominator=st.integers(1, 10**6))
def test_one_number_in_three_spellings(numerator, denominator):
    value = Fraction(numerator, denominator)
    sign = "-" if value < 0 else ""
    spellings = [
        f"{value.numerator}/{value.denominator}",
        f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}",
    ]
    if value.denominator == 1:
        spellings += [str(value.numerator), f"{value.numerator:,}", f"{value.numerator}.0"]
    for spelling in spellings:
        number = read_number(spelling)
        assert number is not None and number.value == value
        assert compare(spelling, spellings[0], how="numeric").outcome == "right"


@given(value=st.integers(-(10**12), 10**12), off=st.integers(1, 1000))
def test_whole_numbers_have_no_tolerance(value, off):
    assert compare(str(value + off), str(value), how="numeric", tolerance=0.1).outcome == "wrong"
    assert compare(f"{value}.{off:04}", str(value), how="numeric", tolerance=0.1).outcome == "wrong"


@given(digits=st.integers(10001, 99999), power=st.integers(-290, 290), apart=st.integers(1, 40000))
def test_tolerance_is_relative_at_every_magnitude(digits, power, apart):
    label = f"{digits / 1e4:.4f}e{power}"
    assert compare(f"{digits / 1e4:.4f}0e{power}", label, how="numeric").outcome == "right"
    assert (
        compare(f"{digits / 1e4 + apart * 1e-4:.4f}e{power}", label, how="numeric").outcome
        == "wrong"
    )
    assert compare("0", label, how="numeric").outcome == "wrong"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [("3.14159", "right"), ("3.135", "right"), ("3.15", "wrong"), ("3.1", "wrong"), ("3", "wrong")],
)
def test_a_wide_tolerance_ends_at_the_digits_of_the_label(answer, outcome):
    assert compare(answer, "3.14", how="numeric", tolerance=0.5).outcome == outcome


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.builds(
        lambda a, sign, b: f"{a}{sign}{b}", inner, st.sampled_from(list("+-*/^=,;:|±×")), inner
    ),
    max_leaves=5,
)


@given(text=expressions, label=st.integers(-200, 200))
def test_an_expression_is_no_answer_to_a_whole_number(text, label):
    for how in ("auto", "numeric"):
        right = compare(text, str(label), how=how).outcome == "right"
        assert right == (text == str(label) or (text.isdigit() and int(text) == label))


@given(
    value=st.fractions(min_value=-1000, max_value=1000, max_denominator=50),
    factor=st.sampled_from([100, 10000]),
)
def test_percent_is_never_off_by_a_hundred(value, factor):
    label = f"{value.numerator}%" if value.numerator else "1%"
    number = int(label[:-1])
    for answer in (
        f"{number * factor}%",
        str(number * factor),
        f"{number}e-{len(str(factor)) - 1}%",
    ):
        assert compare(answer, label, how="auto", question="What percentage?").outcome == "wrong"


@pytest.mark.parametrize("compare_key", ["auto", "numeric"])
def test_the_check_pays_no_copied_question(compare_key):
    check = build_check(AnswerPart(compare=compare_key).for_check(), Tools())

    def value(answer: str, label: str, question: str) -> float:
        task = {"answer": label}
        return check(
            Item(
                text=f"<answer>{answer}</answer>",
                task=task,
                prompt=question,
                finish="stop",
                num_tokens=9,
            )
        )[0]

    asked = "State the final answer to the following arithmetic problem: 4 - 1 + 7 + 7 - 7 ="
    assert value("4 - 1 + 7 + 7 - 7", "10", asked) == 0.0
    assert value("10", "10", asked) == 1.0
    assert value("50%", "50", "What percentage of them is red?") == 1.0
    assert value("50%", "50", asked) == 0.0
    assert value("0.5", "50%", "Write 0.5 as a percentage.") == 0.0


@pytest.mark.parametrize(
    ("answer", "label", "how", "outcome"),
    [
        ("42", "42", "exact", "right"),
        ("42.0", "42", "exact", "wrong"),
        ("42.0", "42", "numeric", "right"),
        ("0.333", "1/3", "numeric", "wrong"),
        ("0.33333333", "1/3", "numeric", "right"),
        ("50%", "0.5", "numeric", "wrong"),
        ("about five", "5", "numeric", "unreadable answer"),
        ("5", "five", "numeric", "unreadable label"),
        ("Paris.", "paris", "auto", "right"),
        ("London", "Paris", "auto", "wrong"),
        (r"\text{Yes}", "yes", "auto", "right"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", "auto", "right"),
        ("x = 5", "5", "auto", "unreadable answer"),
        ("2^3", "8", "auto", "unreadable answer"),
        ("2^3", "8", "numeric", "unreadable answer"),
        ("2^3", "8", "latex", "right"),
        ("500", "5%", "latex", "wrong"),
        ("(x+1)^2", "x^2+2x+1", "latex", "right"),
        (r"\{2,1\}", r"\{1,2\}", "latex", "right"),
        ("(-\\infty, 3]", "(-\\infty, 3)", "latex", "wrong"),
        ("1, 2, 42", "42", "auto", "unreadable answer"),
        ("42 or 43", "42", "auto", "unreadable answer"),
        ("???", "5", "auto", "unreadable answer"),
        (r"\frac{3}{", "5", "auto", "unreadable answer"),
        ("5", "???", "latex", "unreadable label"),
    ],
)
def test_outcomes(answer, label, how, outcome):
    assert compare(answer, label, how=how).outcome == outcome


def test_no_label_is_told_apart_from_no_answer():
    right = r"<answer>5</answer>"
    for label in (None, "", "  ", [], {"a": 1}, True, float("nan"), float("inf")):
        assert match_answer(right, label, forms=FORMS).outcome == "unreadable label"
    assert match_answer("5", "5", forms=FORMS).outcome == "unreadable answer"
    assert match_answer(right, 5, forms=FORMS).outcome == "right"
    assert match_answer(right, "2 + 3 = 5\n#### 5", forms=FORMS).outcome == "right"
    assert clean_label(r"so it is \boxed{\frac{1}{2}}") == r"\frac{1}{2}"


def test_only_the_tail_is_read():
    text = "<answer>5</answer>" + " " * 400
    assert match_answer(text, "5", forms=FORMS, tail_chars=300).outcome == "unreadable answer"


def test_slow_comparison_is_announced_first():
    told = []
    for answer, label, slow in (
        ("5", "5", 0),
        ("5.0", "5", 0),
        ("cat", "dog", 0),
        ("2^3", "8", 0),
        ("A", "B", 0),
        ("2^x", "x^2", 1),
    ):
        told.clear()
        compare(answer, label, how="auto", before_latex=lambda: told.append(1))
        assert len(told) == slow


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("The answer is −5", "-5", "5"),
        ("The answer is -$5", "-5", "5"),
        ("The answer is - 5", "-5", "5"),
        ("so 2 1/2", "5/2", "1/2"),
        ("so 1.5 million.", "1500000", "1.5"),
        ("so ４２", "42", "2"),
        ("so 4 × 10^3", "4e3", "3"),
        ("so 3 - 5", None, "5"),
        ("so 3 - 5", None, "-5"),
        ("so 6*7", None, "7"),
        ("so 1 000", None, "0"),
        ("6 × 7 = 42", "42", "6"),
    ],
)
def test_the_last_number_is_read_whole(text, right, wrong):
    assert right is None or match_answer(text, right, forms=("number",)).outcome == "right"
    assert match_answer(text, wrong, forms=("number",)).outcome != "right"


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("192.168.0.1", "192.168.0.1.", "192.168.0.2"),
        ("3-2", "**3-2**", "1"),
        ("3-2", "3-2.", "5-4"),
        ("10 am", "10 AM", "7+3 am"),
        ("120 pm", "120 pm.", "4*30"),
        ("x=42", "x = 42", "40+2"),
        ("x=42", "42", "x=40+2"),
        ("(42)", "42", "6*7"),
        ("H2O", "h2o", "OH2"),
        ("(10,100)", "(10, 100)", "10100"),
        ("x = (3,456)", "(3, 456)", "3456"),
        ("(1,234)", "(1,234)", "1234"),
        ("1011_2", "$1011_{2}$", "1011_3"),
        ("12_{5}", "12_5", "21_5"),
        ("2x", "x*2", "3x"),
    ],
)
def test_plain_labels_are_not_evaluated(label, right, wrong):
    assert compare(right, label, how="auto").outcome == "right"
    assert compare(wrong, label, how="auto").outcome != "right"


@pytest.mark.parametrize("answer", ["42 thirty", "42 eleven", "42 doubled", "42 square"])
def test_a_word_that_changes_the_number_is_no_unit(answer):
    assert (
        compare(answer, "42", how="auto", question=f"{answer.split()[1]} of it?").outcome != "right"
    )


def test_how_many_names_the_unit():
    asked = "How many hours is the 90 minutes trip?"
    assert compare("1.5 minutes", "1.5", how="auto", question=asked).outcome == "wrong"
    assert compare("1.5 hours", "1.5", how="auto", question=asked).outcome == "right"
