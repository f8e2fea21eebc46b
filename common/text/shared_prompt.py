"""The prompt of two texts without one: what both share, in any script."""

import os
import re
import unicodedata

# The first words of Unicode's names for letters of scripts without spaces between words, next to
# the wide ones of Chinese and Japanese
UNSPACED = ("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "TAI", "NEW TAI", "BALINESE", "JAVANESE")
# Characters that the next one belongs to: joiners, signs below which the next letter is written
# (Myanmar, Khmer, Tai Tham, Balinese, Javanese), vowels in front of theirs (Thai, Lao)
LEADING = "\u200c\u200d\u1039\u17d2\u1a60\u1b44\ua9c0เแโใไເແໂໃໄ"


def shared_prompt(first: str, second: str) -> str:
    """The beginning that two texts share, up to the last place where a prompt may end.

    A single space at its end goes to the completions, as in `trl-lib/tldr`; other white space
    stays.
    """
    words = (first.rstrip(), second.rstrip())  # no completion is blank
    ends = (i for i in range(len(os.path.commonprefix(words)), 0, -1) if may_end(*words, i))
    return re.sub(r"(?<=\S) \Z", "", first[: next(ends, 0)])


def may_end(first: str, second: str, end: int) -> bool:
    """Whether a prompt may end behind the first `end` characters, which both texts share.

    It may at white space, and next to a letter of a script without spaces: no word of another
    script is cut, no letter loses its marks, and no completion is empty.
    """
    last, following = first[end - 1], [text[end : end + 1] for text in (first, second)]
    if not all(following) or not (ends_word(last) or all(map(ends_word, following))):
        return False
    return last not in LEADING and not any(map(is_attached, following))


def ends_word(char: str) -> bool:
    """Whether words end at a character: white space, or of a script without spaces."""
    if char.isspace():
        return True
    name = unicodedata.name(char, "")
    is_wide = unicodedata.east_asian_width(char) in "WFH"  # also emoji and Korean, whose words have
    is_symbol = unicodedata.category(char) in ("So", "Sk")  # spaces between them
    return name.startswith(UNSPACED) or (is_wide and not is_symbol and "HANGUL" not in name)


def is_attached(char: str) -> bool:
    """Whether a character belongs to the one before: a mark, also one that takes its own space."""
    decomposed = unicodedata.normalize("NFKD", char)  # Thai and Lao "am", half-width voiced kana
    return char in "\u200c\u200d" or unicodedata.category(decomposed[0])[0] == "M"
