"""lessons.check accepts a sound lesson, and refuses one that fails or whose self-check is blind."""
import pytest

from common import lessons

LESSON = """
def double(x):
    raise NotImplementedError

def check_double(f):
    assert f(3) == {expected}, "3 doubled is 6"

def double_solution(x):
    return 2 * x

check_double(double_solution)
"""


def write(folder, expected="6"):
    path = folder / "lessons" / "01_double.py"
    path.parent.mkdir()
    path.write_text(LESSON.format(expected=expected), encoding="utf-8")
    return path


def test_a_sound_lesson_passes_and_its_self_check_refuses_a_wrong_answer(tmp_path):
    path = write(tmp_path)
    assert lessons.exercises(path) == ["double"]
    assert "refused (3 doubled is 6)" in lessons.check(path, {"double": "def double(x): return x"})


def test_a_failing_lesson_fails(tmp_path):
    with pytest.raises(AssertionError, match="exit status 1"):
        lessons.check(write(tmp_path, "7"), {"double": "def double(x): return x"})


def test_a_blind_self_check_fails(tmp_path):
    with pytest.raises(AssertionError, match="accepts a wrong answer"):
        lessons.check(write(tmp_path, "f(3)"), {"double": "def double(x): return x"})


def test_each_exercise_needs_a_wrong_answer(tmp_path):
    with pytest.raises(AssertionError, match="wrong answers are given for"):
        lessons.check(write(tmp_path), {})
