"""The SQL that makes tables of event lines: every field of every kind, with what a line leaves out filled in."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptrace import events as ev

#: Columns of an event line as it is written, with their DuckDB types; numbers of groups and units become names later.
RAW: dict[str, str] = {
    "seq": "BIGINT", "kind": "VARCHAR", "t0": "BIGINT", "t1": "BIGINT", "step": "BIGINT", "pass": "VARCHAR", "parent": "BIGINT",
    "model": "INTEGER", "group": "INTEGER", "thread": "INTEGER",
}  # fmt: skip
#: Columns of a violation line.
_FOUND = {"rule": "VARCHAR", "severity": "VARCHAR", "fqn": "VARCHAR", "message": "VARCHAR", "hint": "VARCHAR"}
_TYPES = {
    "int": "BIGINT",
    "bytes": "BIGINT",
    "ns": "BIGINT",
    "count": "BIGINT",
    "group": "INTEGER",
    "unit": "INTEGER",
    "bool": "BOOLEAN",
}
_PACKED = {"how": ("noop", "direction", "mode"), "op": ("op", "which")}  # several values in one integer of a record


def _fields() -> dict[str, list[tuple[int, ev.FieldSpec]]]:
    """The kinds that have a field, by its name; fields that are worked out are not in a line."""
    named: dict[str, list[tuple[int, ev.FieldSpec]]] = {}
    for number, spec in ev.SPECS.items():
        if number == ev.VIOLATION:
            continue
        for field in spec.fields:
            for name in _PACKED.get(field.codec, (field.name,)):
                if field.codec != "derived":
                    named.setdefault(name, []).append((number, field))
    return named


FIELDS = _fields()


def _type(uses: list[tuple[int, ev.FieldSpec]]) -> str:
    kinds = {_TYPES.get(field.codec, "VARCHAR") for _, field in uses}
    return kinds.pop() if len(kinds) == 1 else "VARCHAR"  # a name that two kinds use for different things


def raw_columns() -> dict[str, str]:
    """Columns and types of what is read from the files."""
    own = {name: _type(uses) for name, uses in FIELDS.items() if name not in RAW}
    return {**RAW, **own, **{name: kind for name, kind in _FOUND.items() if name not in own}}


def _usual(name: str, uses: list[tuple[int, ev.FieldSpec]]) -> str:
    """The column ``name`` with what lines leave out."""
    kinds = _type(uses)
    cases = []
    for number, field in uses:
        if field.usual == "model":
            cases.append(f"WHEN '{ev.KINDS[number]}' THEN g.{name}")
        elif isinstance(field.usual, int) and name == field.name:
            value = f"'{field.names[field.usual]}'" if field.names else str(field.usual)
            value = ("true" if field.usual else "false") if field.codec == "bool" else value
            cases.append(f"WHEN '{ev.KINDS[number]}' THEN {value if kinds != 'VARCHAR' else f'CAST({value} AS VARCHAR)'}")
    return f'coalesce(e."{name}", CASE e.kind {" ".join(cases)} END)' if cases else f'e."{name}"'


def quoted(text: str) -> str:
    """``text`` between the quotes of an SQL string."""
    return text.replace("'", "''")


def lines_of(files: Sequence[str], largest: int) -> str:
    """``SELECT`` of the lines of ``files``; what cannot be read is skipped. ``largest``: bytes of a line at most."""
    paths = ", ".join(f"'{quoted(file)}'" for file in files)
    columns = ", ".join(f"'{name}': '{kind}'" for name, kind in raw_columns().items())
    return (
        f"SELECT *, filename AS file FROM read_json([{paths}], format='newline_delimited', columns={{{columns}}}, "
        f"ignore_errors=true, filename=true, maximum_object_size={largest})"
    )


def events_of(lines: str) -> str:
    """``SELECT`` of the table of events, from ``lines`` (another one, see :func:`lines_of`) and the tables ``sources`` (the
    files), ``groups`` and ``units_of`` (the model lines)."""
    names = [name for name in FIELDS if name not in RAW]
    columns = [
        "s.run", "s.rank", "e.step", "e.seq", "e.kind", "coalesce(e.\"pass\", 'none') AS \"pass\"",
        "coalesce(e.model, 0) AS model",
        "coalesce(g.fqn, j_unit.fqn, CASE WHEN e.kind = 'violation' THEN e.fqn END) AS unit",
        "e.t0", "e.t1", "e.t1 - e.t0 AS duration_ns", "e.t0 + s.clock AS unix_ns", "e.parent",
        "coalesce(e.thread, 0) AS thread", 'e."group" AS group_id',
    ]  # fmt: skip
    joins = []
    for name in names:
        value = _usual(name, FIELDS[name])
        codecs = {field.codec for _, field in FIELDS[name]}
        if codecs <= {"group", "unit"}:
            table = "groups" if codecs == {"group"} else "units_of"
            joins.append(
                f"LEFT JOIN {table} AS j_{name} ON j_{name}.file = e.file AND j_{name}.model = coalesce(e.model, 0) "
                f'AND j_{name}.id = e."{name}"'
            )
            value = f"j_{name}.fqn"
        if name != "unit":  # of a region, an exception: in the place of the group's
            columns.append(f'{value} AS "{name}"')
    world, size = _usual("world", FIELDS["world"]), _usual("bytes", FIELDS["bytes"])
    part = f"({size} // {world} * ({world} - 1))"
    columns.append(
        f"CASE WHEN e.kind IN ('unshard', 'reduce_scatter', 'all_reduce') THEN CASE WHEN {world} <= 1 THEN 0 "
        f"WHEN e.kind = 'all_reduce' THEN 2 * {part} ELSE {part} END END AS wire_bytes"
    )
    columns += ["e.rule", "e.severity", "e.message", "e.hint"]
    kinds = ", ".join(f"'{name}'" for name in ev.KINDS if name)
    return (
        f"SELECT {', '.join(columns)} FROM ({lines}) AS e JOIN sources AS s ON s.file = e.file "
        'LEFT JOIN groups AS g ON g.file = e.file AND g.model = coalesce(e.model, 0) AND g.id = e."group" '
        f"{' '.join(joins)} WHERE e.kind IN ({kinds}) AND e.seq IS NOT NULL AND e.step IS NOT NULL AND e.t0 IS NOT NULL "
        'AND e.t1 IS NOT NULL AND (e."group" IS NULL OR g.id IS NOT NULL)'
    )
