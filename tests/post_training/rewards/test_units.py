"""Every unit, checked against a definition from a source other than the rule's own table."""

from fractions import Fraction

import pytest
from scipy import constants

from post_training.rewards.unit_table import PARTS, SCALES, UNITS
from post_training.rewards.units import quantity

# SI units, inches, ounces, dollars and yuan, from scipy and the definitions; a month has no fixed length.
DEFINED = {
    ("mm", "millimeter", "millimetre", "毫米"): ("m", constants.milli),
    ("cm", "centimeter", "centimetre", "厘米", "公分"): ("m", constants.centi),
    ("dm", "decimeter", "decimetre", "分米"): ("m", constants.deci),
    ("m", "meter", "metre", "米"): ("m", 1),
    ("km", "kilometer", "kilometre", "千米", "公里"): ("m", constants.kilo),
    ("in", "inch", "inches", "英寸"): ("in", 1),
    ("ft", "foot", "feet", "英尺"): ("in", constants.foot / constants.inch),
    ("yd", "yard", "码"): ("in", constants.yard / constants.inch),
    ("mi", "mile", "英里"): ("in", constants.mile / constants.inch),
    ("s", "sec", "second", "秒", "秒钟"): ("s", 1),
    ("min", "minute", "分", "分钟"): ("s", constants.minute),
    ("h", "hr", "hour", "小时", "时", "个小时"): ("s", constants.hour),
    ("day", "天", "日"): ("s", constants.day),
    ("week", "周", "星期"): ("s", constants.week),
    ("month", "月", "个月"): ("month", 1),
    ("yr", "year", "年"): ("month", 12),
    ("mg", "milligram", "毫克"): ("g", constants.milli),
    ("g", "gram", "克"): ("g", 1),
    ("kg", "kilogram", "千克", "公斤"): ("g", 1 / constants.gram),
    ("ton", "tonne", "吨"): ("g", constants.metric_ton / constants.gram),
    ("oz", "ounce"): ("oz", 1),
    ("lb", "pound"): ("oz", constants.pound / constants.oz),
    ("ml", "milliliter", "millilitre", "毫升"): ("L", constants.milli),
    ("L", "liter", "litre", "升"): ("L", 1),
    ("cent",): ("dollar", constants.centi),
    ("dollar", "usd", "美元"): ("dollar", 1),
    ("fen",): ("yuan", constants.centi),
    ("jiao", "角"): ("yuan", constants.deci),
    ("yuan", "rmb", "元", "块", "块钱", "圆"): ("yuan", 1),
    ("mph",): ("mph", 1),
    ("rad", "radian", "弧度"): ("rad", 1),
    ("deg", "degree", "度"): ("degree", 1),
    ("C", "celsius"): ("C", 1),
    ("F", "fahrenheit"): ("F", 1),
}


def test_every_unit_is_as_it_is_defined():
    # scipy's floats differ in the last bit from the definitions, which are integers or have three decimals.
    expected = {
        name: (base, Fraction(size).limit_denominator(1000))
        for names, (base, size) in DEFINED.items()
        for name in names
    }
    assert expected == UNITS


@pytest.mark.parametrize(
    ("word", "times"),
    [
        ("hundred", 100), ("thousand", constants.kilo), ("million", constants.mega), ("billion", constants.giga),
        ("trillion", constants.tera), ("quadrillion", constants.peta), ("dozen", 12), ("gross", 144), ("百", 100),
        ("千", 1000), ("万", 10000), ("亿", 10**8), ("万亿", 10**12), ("百万", 10**6), ("千万", 10**7), ("打", 12),
    ],
)  # fmt: skip
def test_a_number_word_multiplies(word, times):
    assert quantity(f"7 {word}").value == str(7 * int(times)) and SCALES[word] == times


@pytest.mark.parametrize("part", PARTS)
def test_a_part_divides(part):
    assert quantity(rf"11\text{{ {part}s}}").value == f"11/{PARTS[part]}"


@pytest.mark.parametrize(
    ("answer", "value", "dimension"),
    [
        ("2小时30分", "5/2", "s"), ("3元5角", "7/2", "yuan"), ("8元50分", "17/2", "yuan"), ("5 ft 6 in", "11/2", "in"),
        (r"1\text{ hour } 30\text{ minutes}", "3/2", "s"), ("5万元", "50000", "yuan"), ("34个", "34", None),
        ("34个苹果", "34", "苹果"), ("20 squared", "(20)^{2}", None), ("8 factorial", "(8)!", None),
        (r"2\text{ pi}", r"(2)\cdot\pi", None), (r"5\text{ degrees below zero}", "-5", "degree"),
        ("2 dozen eggs", "24", "egg"), ("x million", "x million", None),
    ],
)  # fmt: skip
def test_amounts_are_read(answer, value, dimension):
    found = quantity(answer)
    assert (found.value, found.unit.dimension[0][0] if found.unit else None, found.readable) == (value, dimension, True)


@pytest.mark.parametrize("answer", ["5 square meters per second", "5 平方米每秒"])
def test_square_counts_for_the_next_unit_alone(answer):
    assert quantity(answer).unit.dimension == (("m", 2), ("s", -1))


@pytest.mark.parametrize(
    "answer",
    [r"5\text{ or more}", r"5\text{ plus}", "5的倍数", "5左右", r"5\text{ over}", "5 score", "5 meters million", "3成",
     "7 km" + " squared" * 4, "7 km" + " squared" * 1000, "7 " + "million " * 17, "7" + " squared" * 2],
)  # fmt: skip
def test_words_that_change_a_value_are_not_passed_over(answer):
    assert not quantity(answer).readable


@pytest.mark.parametrize("answer", ["2小时3小时", "30分2小时", "2 hours 3 apples", "1 2 3", "2小时30"])
def test_amounts_that_do_not_add_up_are_no_sum(answer):
    found = quantity(answer)
    assert not found.readable or found.unit is None or not found.value.replace("/", "").isdigit()
