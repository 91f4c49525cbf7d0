r"""Tell a thought from an answer in a response without ``</think>``: the text behind a thought doubts it or breaks off.

A response does not show whether its prompt opened ``<think>``. So words count as a doubt only in places where a model
talks to itself: "Wait, ..." is one, and "Tom waits for the bus" is not.
"""

import re
from itertools import islice

# The start of a line or a sentence, or the end of the answer: \boxed{5}, wait, ... Blanks are bounded everywhere,
# since a response of empty lines would take quadratic time.
_START = r"(?:^|[.!?—–…。！？]|(?:[}$]|\\[)\]])[.,，。]?)[\s*_\"'(>“”‘-]{0,4}"
# The label "Wait: 5 minutes" and the word "wait-list" are no interjections.
_BEHIND = r"(?=[ *_]{0,3}(?:[,.!?;—–…，。！？]|-(?!\w)|:(?![ *$]{0,3}\d)|$))"
_CHECK = (
    r"(?:double[- ]?check|check|verify|confirm|test|re-?(?:calculate|check|compute|consider|count|do|evaluate|examine"
    r"|read|think|try|verify|visit|work))"
)
_CLOSER_LOOK = rf"(?:{_CHECK}|account|consider|exclude|include|try)"
# The last word of the pattern means "wait" only at the start of a sentence, and "and so on" behind a list.
_INTERJECTION = (
    rf"{_START}(?=[a-z等慢这好似感不])(?:(?:oh|ah|but|no|hmm+|ok|okay|so|and|actually|well)(?:, ?| ))?"
    rf"(?:(?:wait|hmm+|hold on|hang on|scratch that|on second thoughts?)(?: a (?:minute|moment|sec|second))?{_BEHIND}"
    r"|no(?=,)|wait (?:no|but|actually|maybe|that is|that's|is)\b|hmm+ (?:but|let|maybe|no|that|wait)\b"
    rf"|not sure\b(?!\?)|(?:(?:这|好像|似乎|感觉){{0,2}}不太?对|慢着|等一下|等会儿|等等){_BEHIND})"
)
_ENGLISH = (
    r"(?:I'm|I am|we're|we are) (?:still )?not (?:at all |completely |entirely |quite |really |so |too )?"
    r"(?:sure|certain)\b",
    r"(?:I|we)(?:'ll| will| should| must| need to| have to| want to| can)? double[- ]check\b",
    r"let me\b(?! (?:also |just )?(?:clarify|conclude|explain|help|illustrate|know|mention|present|restate|show|state"
    r"|summari[sz]e)\b)",
    r"let's (?:double(?:[- ]?check)?|check|verify|see|try|test|confirm)\b",
    r"but (?:is|are|does|do|what|how|why)\b[^.!?\n]{0,120}\?",
    r"but (?:this|that|it) (?:contradicts|seems (?:odd|off|strange|too|wrong)|(?:isn't|is not|can't be|cannot be"
    r"|doesn't (?:look|seem)|does not (?:look|seem)) (?:correct|possible|right|true))\b",
    rf"should (?-i:I) (?:also |just |now |not )?{_CLOSER_LOOK}\b",
    r"am (?-i:I) (?:allowed|certain|correct|forgetting|missing|misreading|overcounting|right|supposed|sure|wrong)\b",
    rf"(?-i:I) (?:should|need to) (?:also |just |now )?(?:{_CLOSER_LOOK}|be careful|calculate|compute|count|find"
    r"|go back|look|make sure|see|think)\b",
    r"is (?:that|this|it) (?:right|correct)(?=[ *_]{0,3}(?:\?|$))",
)
_LOOK = r"(?:检|验|核|算|计算|看|想|试|数|读|确认|回顾|思考|考虑|审视)"
_CHINESE = (
    rf"[,，;；]\s{{0,2}}(?:这|好像|似乎|感觉){{0,2}}不太?对{_BEHIND}",
    rf"让我们?(?:再|来|先|重新|仔细|回头){{0,3}}{_LOOK}",
    rf"我们?(?:需要|应该|必须|得|要|想|来|先|还是|可以){{0,2}}(?:再|重新|回头)(?:来|仔细)?{_LOOK}",
    r"(?:也许|或许)是?我|我们?(?:也许|或许)",
    r"我们?是不是|是不是(?:我|漏|[算搞弄看]错)",
    r"(?:这|答案|结果)[个样]?(?:答案|结果)?是(?:否|不是)(?:正确|对)的?\s{0,2}[?？]",
)
_DOUBT = re.compile("|".join((_INTERJECTION, rf"\b(?:{'|'.join(_ENGLISH)})", *_CHINESE)), re.IGNORECASE | re.MULTILINE)
_DOUBTED_BOX = re.compile(r"\b(?:perhaps|maybe|possibly|could it be|might be|is it)[\s:$]{0,4}$", re.IGNORECASE)
_LONGEST_DOUBT = 32
# These may begin a remark after an answer; in a text that breaks off they begin another attempt.
_ATTEMPT = re.compile(
    r"\b(?:maybe|perhaps|actually|alternatively|another (?:way|approach|method))\b|也许|或许|另一种", re.IGNORECASE
)
_WORD = re.compile(r"\S+")
_MOST_WORDS_BEHIND = 8

_LONGEST_LINE = 2000
END_TOKEN = re.compile(r"(?:<\|[a-zA-Z_\uff5c\u2581]{1,32}\|>|</?s>|<\uff5c[^<>]{1,32}\uff5c>|\[EOS\])\s*$")
"""A special token at the end of a response, if the reward sees it."""
_FINISHED = re.compile(
    r"[.!?$})\]…。！？）】》]$|\|>$|</?[a-zA-Z]{1,20} ?/?>$"
    r"|(?<=\S)[\"”»」』]$|(?<=[.!?…。！？])['’]$"
    r"|^(?:```|[-*_=]{3,})$|^\|.*\|$"  # code, a rule, a row of a table
    r"|[\u220e\u25a0-\u25ff\u2600-\u2793\u2b50-\u2b55\U0001f000-\U0001faff][\u200d\ufe0f\u20e3]?$"  # ∎ and emoji
    r"|(?<=\S) ?[~～]$"
)
_MARKUP = re.compile(r"(?<=[^\s*_`])([*_`]{1,3})$")
# A line that may do without a full stop: a list item, a labelled value, an equation of numbers, a signature.
_COMPLETE = re.compile(
    r"^(?:[*+] \S|[-•·–—] ?\S|\(?(?:\d{1,3}|[a-zA-Z])[.)] \S|(?:\d{1,3}|[①-⑳])[、.]\S)"
    r"|^[#*_ ]{0,6}(?:the )?(?:final )?(?:answer|result|total|答案|结果|答)[*_ ]{0,3}(?:[:：]|is\b|[是为])"
    r"|= ?[-+−]?[$€£¥]? ?\d[\d.,/]*(?: ?[%°]| ?[^\W\d_]{1,20})?$"
    r"|^\W{0,4}(?:edit(?:ed)?|written|posted|contributed) by \w"
    r"|(?:^|\s)~ ?[^\W\d][\w.-]*(?: [\w.-]+){0,3}$",
    re.IGNORECASE,
)
_SIGN_OFF = re.compile(
    r"(?:^|\n)[^\n]{0,20}(?:cheers|regards|sincerely|thanks|thank you|wishes|yours)[,!.]?\s{1,3}[^\n]{1,40}$",
    re.IGNORECASE,
)
# With these at its end, no line is complete. Single letters may be names of variables.
_CUT_OFF = re.compile(
    r"[-,;:+*/=<>(\[{&\\^_，；：、]$|\b(?:about|an|and|are|as|at|be|because|been|between|but|by|can|could|for|from|had|has"
    r"|have|his|her|if|in|into|is|its|let|let's|must|my|not|of|on|or|our|should|since|so|than|that|the|their|then|these"
    r"|this|those|to|was|we|were|when|where|which|while|will|with|would)$"
)


def is_doubted(text: str, begin: int) -> bool:
    """Return whether a text retracts the answer that begins at `begin`, or goes on looking for another one."""
    if doubts(text, begin) or _DOUBTED_BOX.search(text, max(begin - _LONGEST_DOUBT, 0), begin) is not None:
        return True
    goes_on = _ATTEMPT.search(text, begin) is not None or _has_many_words(text, begin)
    return goes_on and breaks_off(text)


def doubts(text: str, begin: int) -> bool:
    """Return whether the text from `begin` on has words of doubt."""
    return _DOUBT.search(text[begin:].replace("\u2019", "'")) is not None


def _has_many_words(text: str, begin: int) -> bool:
    """Return whether many words follow the box: an answer is followed by few."""
    return sum(1 for _ in islice(_WORD.finditer(text, begin), _MOST_WORDS_BEHIND + 2)) > _MOST_WORDS_BEHIND + 1


def breaks_off(text: str) -> bool:
    """Return whether a text ends within a sentence: its last line has no end, and is not of a kind that needs none."""
    end = text[-_LONGEST_LINE:].rstrip()
    line = end.rpartition("\n")[2].strip()
    if END_TOKEN.search(end) or _FINISHED.search(line):
        return False
    if (markup := _MARKUP.search(line)) is not None:
        return line.count(markup[1]) % 2 == 1
    if _CUT_OFF.search(line):
        return True
    return _COMPLETE.search(line) is None and _SIGN_OFF.search(end) is None
