"""Words that may follow a number: units with their sizes, number words, and words that change a value."""

from fractions import Fraction

# Every unit: its names, the base unit of its dimension, and its size in base units.
_TABLE = """
mm millimeter millimetre 毫米              | m      | 1/1000
cm centimeter centimetre 厘米 公分         | m      | 1/100
dm decimeter decimetre 分米                | m      | 1/10
m meter metre 米                           | m      | 1
km kilometer kilometre 千米 公里           | m      | 1000
in inch inches 英寸                        | in     | 1
ft foot feet 英尺                          | in     | 12
yd yard 码                                 | in     | 36
mi mile 英里                               | in     | 63360
s sec second 秒 秒钟                       | s      | 1
min minute 分 分钟                         | s      | 60
h hr hour 小时 时 个小时                   | s      | 3600
day 天 日                                  | s      | 86400
week 周 星期                               | s      | 604800
month 月 个月                              | month  | 1
yr year 年                                 | month  | 12
mg milligram 毫克                          | g      | 1/1000
g gram 克                                  | g      | 1
kg kilogram 千克 公斤                      | g      | 1000
ton tonne 吨                               | g      | 1000000
oz ounce                                   | oz     | 1
lb pound                                   | oz     | 16
ml milliliter millilitre 毫升              | L      | 1/1000
L liter litre 升                           | L      | 1
cent                                       | dollar | 1/100
dollar usd 美元                            | dollar | 1
fen                                        | yuan   | 1/100
jiao 角                                    | yuan   | 1/10
yuan rmb 元 块 块钱 圆                     | yuan   | 1
mph                                        | mph    | 1
rad radian 弧度                            | rad    | 1
deg degree 度                              | degree | 1
C celsius                                  | C      | 1
F fahrenheit                               | F      | 1
"""
UNITS = {
    name: (base.strip(), Fraction(factor.strip()))
    for names, base, factor in (line.split("|") for line in _TABLE.strip().splitlines())
    for name in names.split()
}
SCALES = {
    "ten": 10, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "quadrillion": 10**15, "dozen": 12, "gross": 144, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8, "万亿": 10**12,
    "百万": 10**6, "千万": 10**7, "打": 12,
}  # fmt: skip
PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "twelfth": 12, "sixteenth": 16, "hundredth": 100, "thousandth": 1000, "millionth": 10**6,
    "billionth": 10**9,
}  # fmt: skip
EARLIER_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "平方": 2, "立方": 3}
LATER_POWERS = {"squared": 2, "cubed": 3}
# Chinese measure words, like "unit", do not say what is counted; 34个 and 34只 are both 34.
IGNORED = frozenset(
    "unit of the a an 个 只 名 位 条 张 本 件 支 根 棵 颗 辆 台 枚 份 座 头 匹 朵 把 双 人 次 道 种 钱 整".split()
)
# A number before one of these is only part of a value: 5 or more, 5 and a half, 5 over 2, 5 to the 3.
CHANGING = frozenset(
    (
        "and or plus minus over under divided multiplied multiply by to than between from except if when where mod "
        "modulo power raised zero below above negative not least most double doubled triple tripled quadrupled "
        "halved inverse inverted reciprocal root twice score approximately about nearly almost one two three four "
        "five six seven eight nine ten eleven twelve thirteen fifteen twenty thirty forty fifty sixty seventy "
        "eighty ninety 或 和 与 及 加 减 乘 除 除以 点 至 到 多 余 左右 约 以上 以下 以内 不 非 负 零 一 二 两 三 "
        "四 五 六 七 八 九 十 半 分之 大于 小于 每个 的 成 折"
    ).split()
)
CHINESE = sorted(
    (word for word in {*UNITS, *SCALES, *EARLIER_POWERS, *IGNORED, *CHANGING, "每", "摄氏度"} if ord(word[0]) > 0x2E80),
    key=len,
    reverse=True,
)
