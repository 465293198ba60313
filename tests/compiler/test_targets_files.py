from pathlib import Path

import pytest

from parcompile.backends.writing import write


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_files_are_written_and_nothing_else_is_left(tmp_path) -> None:
    written = write({"plan.json": "1", "launch/run.sh": "#!/bin/sh\n"}, tmp_path / "out")
    assert contents(tmp_path / "out") == {"plan.json": "1", "launch/run.sh": "#!/bin/sh\n"}
    assert written == [tmp_path / "out" / "plan.json", tmp_path / "out" / "launch" / "run.sh"]
    assert (tmp_path / "out" / "launch" / "run.sh").stat().st_mode & 0o111
    assert not (tmp_path / "out" / "plan.json").stat().st_mode & 0o111


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failure_in_the_middle_leaves_the_old_files(tmp_path, monkeypatch, failing) -> None:
    old = {"a.json": "old a", "launch/b.sh": "old b", "plan.json": "old plan"}
    write(old, tmp_path)
    replace, calls = Path.replace, []

    def fails(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        write({"a.json": "new a", "launch/b.sh": "new b", "plan.json": "new plan"}, tmp_path)
    assert contents(tmp_path) == old


def test_a_first_writing_that_fails_leaves_nothing(tmp_path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError, match=r"plan\.json"):
        write({"a.json": "new", "plan.json": "new"}, tmp_path)
    assert contents(tmp_path) == {}


def test_line_ends_are_the_same_on_every_machine(tmp_path) -> None:
    write({"a.txt": "one\ntwo\n"}, tmp_path)
    assert (tmp_path / "a.txt").read_bytes() == b"one\ntwo\n"
