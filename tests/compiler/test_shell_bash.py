"""Drawn scripts give a program the words that bash gives it; scripts that grow without end are refused in time."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from parcompile.cli import cli
from parcompile.text.shell import ShellLimitError, invocations
from parcompile.text.shell.syntax import MAX_WORK
from parcompile.text.shell.words import known

SCRIPTS = 120
NAMES = ("A", "B", "C", "LR", "TP")
PLAIN = ("x", "foo", "8", "1e-4", "a/b", "--bf16", "a,b", "k=v")
OPERATORS = (":-d", ":=e", ":+f", "-g", "+h", "%b", "%%b*", "#a", "##*a", "/a/z", "//a/z", "^^", ",,", ":1", ":0:2")
SUMS = ("1+2", "3*4", "7/2", "-7/2", "8%3", "-8%3", "2**5", "(1+2)*3", "TP*2", "$TP*2+1", "5>3", "1&&0")
LISTS = (
    *(
        "${L[@]}",
        '"${L[@]}"',
        '"${L[*]}"',
        "${L[0]}",
        '"${L[1]}"',
        "${L[*]}",
        "x${L[@]}y",
        '"x${L[@]}y"',
        '"${L[@]} z"',
    ),
)
SETS = ("A=1", 'B="b c"', "C=", "LR=1e-4", "TP=2", 'L=(p "q r" s)')
SHOW = 'show() { printf "%s\\0" "$@" >&9; printf "\\n\\0" >&9; }\nset -f\nexec 9>words\n'
"""Writes its words to a file."""


def word(draw: random.Random, depth: int = 0) -> str:
    kind = draw.random()
    if kind < 0.25:
        return draw.choice(PLAIN)
    if kind < 0.4:
        inner = " ".join(word(draw, depth + 1) for _ in range(draw.randint(0, 3)))
        return '"' + inner.replace('"', "").replace("'", "") + '"'
    if kind < 0.5:
        return "'" + draw.choice(("a b", "$A", "x  y", '"q"')) + "'"
    if kind < 0.65:
        return draw.choice(("$%s", "${%s}", '"$%s"', '"${%s}"')) % draw.choice(NAMES)
    if kind < 0.73:
        return f"${{{draw.choice(NAMES)}{draw.choice(OPERATORS)}}}"
    if kind < 0.8:
        return f"$(({draw.choice(SUMS)}))"
    if kind < 0.9:
        return draw.choice(LISTS)
    return word(draw, depth + 1) + word(draw, depth + 1) if depth < 2 else "z"


def words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(word(draw) for _ in range(draw.randint(least, most)))


def statement(draw: random.Random, depth: int = 0) -> str:
    kind, test = draw.random(), f'[ "$TP" -{draw.choice(("eq", "gt", "lt"))} {draw.randint(1, 8)} ]'
    if kind < 0.35:
        return f"{draw.choice(NAMES[:4])}={word(draw)}"
    if kind < 0.42:
        return f"{draw.choice(NAMES[:4])}+={word(draw)}"
    if kind < 0.55:
        return f"L{draw.choice(('', '+'))}=({words(draw, 0, 3)})"
    if kind < 0.6:
        return f"TP={draw.randint(1, 8)}"
    if kind < 0.7 and depth < 2:
        return f"if {test}; then\n{statement(draw, depth + 1)}\nelse\n{statement(draw, depth + 1)}\nfi"
    if kind < 0.78 and depth < 2:
        return f'for i in {words(draw, 0, 3)}; do\n{statement(draw, depth + 1)}\nA="$A $i"\ndone'
    if kind < 0.84 and depth < 2:
        return f"case $TP in\n1|2) {statement(draw, depth + 1)};;\n*) {statement(draw, depth + 1)};;\nesac"
    if kind < 0.88:
        return f"{test} && A={word(draw)}"
    if kind < 0.91:
        return f"export B={word(draw)}"
    if kind < 0.93:
        return f"for i in {{1..{draw.randint(2, 40)}}}; do\nC=$i\ndone"
    if kind < 0.96 and depth < 2:
        return "eval '" + statement(draw, depth + 1).replace("'", "") + "'"
    return f"show --x {words(draw, 2, 2)}"


def script(seed: int) -> str:
    draw = random.Random(seed)
    lines = [*SETS, *(statement(draw) for _ in range(draw.randint(1, 7)))]
    lines.append(f"show --x {words(draw, 1, 5)}{draw.choice(('', ' &> log', ' > log 2>&1', ' 2>/dev/null'))}")
    if draw.random() < 0.4:
        end = draw.choice(("", "&> log", "> log", "2>&1 | cat", "&& true"))
        lines += [f'CMD="show --x {draw.choice(("${L[@]}", "$A", "${L[*]}"))} {end}"']
        lines.append(draw.choice(('eval "$CMD"', "eval $CMD")))
    return "\n".join(lines) + "\n"


def of_bash(text: str, folder: Path) -> list[tuple[str, ...]] | None:
    """The words of each call; None where bash itself refuses the script."""
    call = ["bash", "--norc", "-c", SHOW + text]
    done = subprocess.run(
        call, cwd=folder, capture_output=True, text=True, timeout=600, check=False, env={"PATH": os.environ["PATH"]}
    )
    if "error" in done.stderr or "bad" in done.stderr:
        return None
    calls = (folder / "words").read_text(encoding="utf-8").split("\n\0")[:-1]
    return list(dict.fromkeys(tuple(call.split("\0")[:-1]) for call in calls))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_drawn_scripts_give_the_words_of_bash(tmp_path: Path) -> None:
    compared = 0
    for seed in range(SCRIPTS):
        text = script(seed)
        found = invocations(text).invocations
        ours = [tuple(known(one) for one in call.words[1:]) for call in found if known(call.words[0]) == "show"]
        theirs = of_bash(text, tmp_path)
        if theirs is None or any(None in call for call in ours):
            continue  # what is not known here may be anything
        assert list(dict.fromkeys(ours)) == theirs, text
        compared += 1
    assert compared > SCRIPTS * 0.9


PROGRAM = "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --micro-batch-size 1 --seq-length 8 $A\n"
GROWING = {
    "a variable that doubles": "A=x\n" + "A=$A$A\n" * 60,
    "one with quotes": 'A="x y"\n' + 'A="$A $A"\n' * 60,
    "one that is appended": "A=xxxxxxxxxx\n" + "A+=$A\n" * 60,
    "a list": "A=(x)\n" + "A=(${A[@]} ${A[@]})\n" * 40,
    "loops in loops": "for i in 1 2 3 4 5 6 7 8; do\n" * 9 + "A=$A$i\n" + "done\n" * 9,
    "replacements": f"A={'a' * 48}\n" + "A=${A//a/$A}\n" * 12,
    "words of many commands": 'A="' + "--x y " * 50_000 + '"\n' + "python a.py $A\n" * 60,
    "brackets without an end": "A=$((\n" * 20_000,
    "quotes without an end": 'echo $(( "\n' * 20_000,
    "texts that evaluate themselves": 'A=\'eval "$A"; eval "$A"; eval "$A"; eval "$A"\'\n' + 'eval "$A"\n' * 5,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", GROWING.values(), ids=GROWING)
def test_what_grows_without_end_ends(text: str) -> None:
    try:
        found = invocations(text + PROGRAM)
    except ShellLimitError as error:
        assert len(str(error)) < 200
    else:
        assert len(found.invocations) <= 64


def test_the_file_and_the_line_are_named(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("A=x\n" + "A=$A$A\n" * 60 + PROGRAM.replace("2 --h", "2 --tensor-model-parallel-size 2 --h"))
    for command in ("check", "import"):
        done = CliRunner().invoke(cli, [command, str(file)])
        assert done.exit_code != 0
        said = re.search(r"run\.sh:(\d+): this script is not followed to its end", " ".join(done.output.split()))
        assert said, done.output
        assert 10 < int(said[1]) < 61
        assert f"{MAX_WORK:,} steps" in " ".join(done.output.split())


EVALUATED = {
    'A=1\neval "A=2"': "2",
    "A=1\neval 'A=$B'": "8",
    'eval "cd . && A=3"': "3",
    'eval "export A=4"': "4",
    'eval "eval \\"A=5\\""': "5",
    'f() { eval "$1=$2"; }\nf A 6': "6",
    'A=1\neval "A=$UNKNOWN"': None,
    "A=0; for i in {1..100}; do A=$((A+1)); done": None,
    "A=0; for i in {1..40}; do A=$((A+1)); done": "40",
    "A=7; for i in {1..100}; do C=$i; done": "7",
    "bash -c 'A=9; $B'\nA=${A:-1}": "1",
}


@pytest.mark.parametrize(("text", "value"), EVALUATED.items())
def test_what_a_shell_reads_again_changes_its_variables(text: str, value: str | None) -> None:
    *_, call = invocations(f"B=8\n{text}\npython x.py --lr $A\n").invocations
    assert known(call.words[-1]) == value


def test_places_of_words_outlive_an_eval() -> None:
    text = 'A=1\neval "A=2; C=3"\npython x.py --lr $A --y z\n'
    (call,) = invocations(text).invocations
    starts = [piece.start for word in call.words for piece in word]
    assert starts == [text.index(one) for one in ("python", "x.py", "--lr", "2;", "--y", "z")]


def test_elements_of_a_list_are_spaced_in_a_string() -> None:
    text = 'A=(--bf16 --lr 1)\nCMD="python x.py ${A[@]} --y"\neval "$CMD &> log"\n'
    (call,) = invocations(text).invocations
    assert [known(one) for one in call.words] == ["python", "x.py", "--bf16", "--lr", "1", "--y"]
