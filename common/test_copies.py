"""Files that stand in several projects on purpose must stay the same in all of them."""
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_run_py_is_the_same_in_every_project():
    copies = sorted(ROOT.glob("*/run.py"))
    assert copies
    different = [str(path.relative_to(ROOT)) for path in copies if path.read_bytes() != copies[0].read_bytes()]
    assert not different, f"{different} differ from {copies[0].relative_to(ROOT)}: mend every copy in the same commit"
