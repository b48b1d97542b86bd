"""What is said of bad input: one line, no longer than can be read, and nothing in it that steers a terminal."""

from lrbpfl.errors import SENTENCE, VALUE, BadInput, plain, shown, unknown


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_text_is_one_line_without_control_characters() -> None:
    assert plain("two\n   lines,\ta tab, a  gap") == "two lines, a tab, a  gap"
    assert plain("\x1b[31mred\x07 \u202eback \ud800") == "�[31mred� �back �"
    assert plain(ValueError("")) == "ValueError"
    assert plain(Mute()) == "Mute"


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    for text in ("begin " + 2000 * "x" + " end", "begin" + 10**6 * "\n" + "end"):
        cut = plain(text, 100)
        assert len(cut) <= 100
        assert cut.startswith("begin")
        assert " ... " in cut
        assert cut.endswith("end")
    assert plain("x" * 100, 100) == "x" * 100


def test_values_are_quoted_whatever_they_are() -> None:
    assert shown("a'b") == '"a\'b"'
    assert len(shown("x" * 5000)) == VALUE
    assert "int" in shown(10**5000)


def test_a_sentence_about_bad_input_is_bounded() -> None:
    assert len(str(BadInput("x" * 10**6))) == SENTENCE
    told = str(unknown("key", "roundz" + 5000 * "z", ["rounds", "seed"]))
    assert len(told) < 200
    assert told.endswith("known: rounds, seed")
