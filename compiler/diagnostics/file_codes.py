"""The pages of the codes that are no rules: J, the text of a file; K, its schema."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileCode:
    """A code and its page. `wrong` and `right` are excerpts of a file, `format` that of both."""

    code: str
    title: str
    explanation: str
    wrong: str
    right: str
    format: str = "json"


def _page(code: str, title: str, explanation: str, wrong: str, right: str, form: str = "json") -> FileCode:
    return FileCode(code, title, " ".join(explanation.split()), wrong, right, form)


_PAGES = (
    _page(
        "J001",
        "not UTF-8",
        """Files are read as UTF-8, with or without a byte order mark. UTF-16, UTF-32 and compressed files are
        recognised and named; any other byte that is not UTF-8 is shown where it stands.""",
        "",
        '{"name": "é"}',
    ),
    _page(
        "J002",
        "file too large",
        """A spec has a few kilobytes; files beyond 8 MiB are not read, because they are most probably not a
        spec.""",
        "",
        "{}",
    ),
    _page("J003", "empty file", "There is nothing in the file but white space or comments.", " ", "{}"),
    _page(
        "J004",
        "something else was expected",
        """A comma, a colon or a value is missing, or stands where none can. Where it is plain what was meant, the
        rest of the file is checked as well.""",
        '{"tp": 2 "cp": 4}',
        '{"tp": 2, "cp": 4}',
    ),
    _page(
        "J005",
        "broken string",
        """A string is not closed on its line, or holds a control character (a tab, a line break) as it is instead of
        its escape.""",
        '{"name": "run\n}',
        '{"name": "run"}',
    ),
    _page(
        "J006",
        "unknown escape",
        r"""After a backslash only certain letters may follow. A Windows path needs two backslashes, or slashes.""",
        r'{"path": "C:\models"}',
        r'{"path": "C:\\models"}',
    ),
    _page(
        "J007",
        "bracket not closed",
        "A bracket is never closed, or closed by one of the other kind. The place of the opening one is shown.",
        '{"betas": [0.9, 0.95}',
        '{"betas": [0.9, 0.95]}',
    ),
    _page(
        "J008",
        "nested too deep",
        "More than 100 brackets stand inside each other; a spec needs six.",
        "[" * 101 + "]" * 101,
        "[]",
    ),
    _page(
        "J009",
        "key written twice",
        """An object has the same key twice. Most readers silently take the last one, so that a forgotten line
        decides. Both places are shown. With the same value, and in arguments of Megatron-LM, it is a warning.""",
        '{"tp": 2, "cp": 1, "tp": 4}',
        '{"tp": 4, "cp": 1}',
    ),
    _page(
        "J010",
        "not a finite number",
        "NaN and infinities are no JSON, and no value of a spec can be one.",
        '{"lr": NaN}',
        '{"lr": 3e-4}',
    ),
    _page(
        "J011",
        "number cannot be held",
        """A whole number lies beyond 64 bits, a fraction beyond the range of a 64-bit float, or it is so small that
        it would become 0.""",
        '{"seed": 99999999999999999999}',
        '{"seed": 9999}',
    ),
    _page(
        "J012",
        "number written wrongly",
        """A JSON number has no leading zeros, underscores or plus sign, and it has digits on both sides of the point.
        In YAML a leading zero means base 8 to YAML 1.1 and base 10 to YAML 1.2, so it is refused.""",
        '{"dropout": .1}',
        '{"dropout": 0.1}',
    ),
    _page(
        "J013",
        "comma before a closing bracket",
        "JSON has no comma after the last entry.",
        '{"tp": 2,}',
        '{"tp": 2}',
    ),
    _page(
        "J014",
        "comment in JSON",
        "JSON has no comments; the same spec as YAML (.yaml) may have them.",
        '{"tp": 2} // two GPUs',
        '{"tp": 2}',
    ),
    _page("J015", "wrong quotes", "Strings stand in straight double quotes.", "{'tp': 2}", '{"tp": 2}'),
    _page(
        "J016",
        "bare word",
        "Text and keys need quotes. Truth values are true and false, and an absent value is null.",
        '{"sequence_parallel": True}',
        '{"sequence_parallel": true}',
    ),
    _page(
        "J017",
        "a template that is not filled in",
        """Words such as GLOBAL_BATCH_SIZE, <lr> or ${STAGE} stand where values are to be: the file is a template, and
        a script replaces them. All of them are one finding, and their keys are not looked at.""",
        '{"train_batch_size": GLOBAL_BATCH_SIZE}',
        '{"train_batch_size": 64}',
    ),
    _page("J018", "key is not text", "A key is text in quotes.", '{1: "a"}', '{"1": "a"}'),
    _page(
        "J020",
        "not YAML",
        "The text breaks a rule of YAML that has no code of its own; most often the indentation is off.",
        "a:\n  b: 1\n c: 2\n",
        "a:\n  b: 1\nc: 2\n",
        "yaml",
    ),
    _page(
        "J021",
        "tab in the indentation",
        "YAML is indented with spaces; a tab has no width.",
        "a:\n\tb: 1\n",
        "a:\n  b: 1\n",
        "yaml",
    ),
    _page(
        "J022",
        "aliases without end",
        """With its aliases written out, the file would have more than a million values, or an alias stands inside
        what it refers to.""",
        "a: &x [*x]\n",
        "a: &x [1]\nb: *x\n",
        "yaml",
    ),
    _page(
        "J023",
        "unknown tag or alias",
        """A spec is plain data: the only tags are those of text, numbers, truth values, lists and mappings. An alias
        needs its anchor above it.""",
        "a: !!python/name:os.system\n",
        "a: text\n",
        "yaml",
    ),
    _page("J024", "several documents", "A file holds one document.", "a: 1\n---\nb: 2\n", "a: 1\n", "yaml"),
    _page(
        "K001",
        "unknown key",
        """No key of this name exists here. Specs are closed at every level, because a misspelt key that is ignored
        costs days: the run goes on with the default. Names of other tools are translated.""",
        '{"tensor_parallel_size": 2}',
        '{"tp": 2}',
    ),
    _page("K002", "missing key", "A key that has no default is missing.", "{}", '{"sequence_length": 8192}'),
    _page("K003", "wrong type", "The value is text where a number is needed, or the like.", '{"tp": "2"}', '{"tp": 2}'),
    _page(
        "K004",
        "not one of the allowed values",
        "The value must be one of a few; the nearest one is suggested.",
        '{"type": "adamww"}',
        '{"type": "adamw"}',
    ),
    _page("K005", "number out of range", "The number is below or above what is possible.", '{"tp": 0}', '{"tp": 1}'),
    _page(
        "K006",
        "text of the wrong form",
        "The text does not have the required form.",
        '{"order": "tp,cp"}',
        '{"order": "tp-cp"}',
    ),
    _page(
        "K007",
        "wrong number of entries or characters",
        "A list or text is too short or too long, or an entry is listed twice.",
        '{"betas": [0.9]}',
        '{"betas": [0.9, 0.95]}',
    ),
    _page(
        "K008",
        "keys or values that exclude each other",
        """Two alternative keys are both given, or a key is given where it is not allowed (any more); the help names
        its replacement.""",
        '{"preset": "llama-3-8b", "hidden_size": 4096}',
        '{"preset": "llama-3-8b"}',
    ),
    _page(
        "K009",
        "a key that needs another key",
        "One key has a meaning only beside another one, which is missing.",
        '{"warmup": 100}',
        '{"warmup": 100, "schedule": "cosine"}',
    ),
    _page(
        "K010",
        "a key of another version",
        """The key is read by other versions of the tool than the one that the file is checked for: it was removed
        before, or came later. The version is that of --deepspeed-version, else of a requirement or lock file near by,
        else the newest known one.""",
        '{"train_micro_batch_size_per_gpu": 1, "sparse_attention": {"mode": "fixed"}}',
        '{"train_micro_batch_size_per_gpu": 1}',
    ),
)

FILE_CODES: dict[str, FileCode] = {page.code: page for page in _PAGES}
"""Every J and K code with its page."""
