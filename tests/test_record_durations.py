"""The seconds that `--record-durations` writes down."""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
EARLIER = {"wall_s": 9.0, "cpu_s": 8.0}


def test_each_target_has_the_seconds_of_its_files_and_a_file_that_did_not_run_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_unit.py").write_text(
        """import time
def test_computes():
    end = time.process_time() + 1.1
    while time.process_time() < end: pass
def test_is_quick(): pass
"""
    )
    (tmp_path / "test_e2e.py").write_text("import time, pytest\n@pytest.mark.e2e\ndef test_waits(): time.sleep(1.1)\n")
    (tmp_path / "test_kept.py").touch()
    (tmp_path / "test_quick.py").write_text("def test_is_quick(): pass\n")
    recorded = tmp_path / "tests" / "durations"
    recorded.mkdir(parents=True)
    earlier = dict.fromkeys(["test_gone.py", "test_kept.py", "test_quick.py"], EARLIER)
    (recorded / "unit.json").write_text(json.dumps(earlier))

    record(tmp_path)

    unit, e2e = (json.loads((recorded / f"{target}.json").read_text()) for target in ("unit", "e2e"))
    assert list(unit) == ["test_kept.py", "test_unit.py"]
    assert unit["test_kept.py"] == EARLIER
    assert unit["test_unit.py"]["cpu_s"] >= 1.1
    assert list(e2e) == ["test_e2e.py"]
    assert e2e["test_e2e.py"]["wall_s"] >= 1.1 > e2e["test_e2e.py"]["cpu_s"]


def test_the_folder_of_the_durations_is_made(tmp_path: Path) -> None:
    (tmp_path / "test_unit.py").write_text("import time\ndef test_waits(): time.sleep(1.1)\n")

    record(tmp_path)

    assert list(json.loads((tmp_path / "tests" / "durations" / "unit.json").read_text())) == ["test_unit.py"]


def record(folder: Path) -> None:
    """Run the tests in the folder with `--record-durations`."""
    command = [sys.executable, "-m", "pytest", "--record-durations", "-n1", "--rootdir", str(folder)]
    subprocess.run(
        [*command, "-c", str(TESTS.parent / "pyproject.toml"), "-p", "no:cacheprovider", str(folder)],
        cwd=TESTS.parent,
        capture_output=True,
        check=True,
    )
