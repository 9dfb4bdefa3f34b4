"""A table with many column types, and tables rebuilt from events inside of PostgreSQL, where equality is decided."""

from __future__ import annotations

import json
from base64 import b64decode

from cdc_replay import Replay
from psycopg2.extensions import quote_ident

SCHEMA = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'very happy');
CREATE DOMAIN posint AS integer CHECK (VALUE > 0);
CREATE TYPE pair AS (a integer, b text);
CREATE TABLE every (
  id integer PRIMARY KEY, c_bool bool, c_int2 int2, c_int8 int8, c_float4 float4, c_float8 float8,
  c_numeric numeric, c_money money, c_text text, c_varchar varchar(40), c_char char(6), c_name name,
  c_bytea bytea, c_date date, c_time time, c_timetz timetz, c_ts timestamp, c_tstz timestamptz,
  c_interval interval, c_uuid uuid, c_json json, c_jsonb jsonb, c_ints integer[], c_texts text[],
  c_tstzs timestamptz[], c_inet inet, c_cidr cidr, c_macaddr macaddr, c_mood mood, c_moods mood[],
  c_range int4range, c_multi int4multirange, c_domain posint, c_bits varbit, c_point point,
  c_vector tsvector, c_oid oid, c_pair pair
);
CREATE TABLE pairs (a text, b int, v text, PRIMARY KEY (b, a));
CREATE TABLE docs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int, body text,
  twice int GENERATED ALWAYS AS (n * 2) STORED);
ALTER TABLE docs ALTER body SET STORAGE EXTERNAL;
CREATE TABLE evolving (id int PRIMARY KEY, a text);
"""
# Texts that PostgreSQL accepts for each column of `every`.
VALUES = {
    "c_bool": ["true", "false"],
    "c_int2": ["-32768", "0", "32767"],
    "c_int8": ["-9223372036854775808", "9223372036854775807", "9007199254740993"],
    "c_float4": ["0.1", "NaN", "1e30", "-0"],
    "c_float8": ["0.1", "-Infinity", "1e-300", "12345678901234567"],
    "c_numeric": ["0.10", "123456789012345678901234567890.123456789", "NaN", "-1e20"],
    "c_money": ["1.50", "-20"],
    "c_text": ["", "a\tb\nc\\d", "'quoted' \"x\"", "\u00e4\u4e2d\U0001f600", "NULL", "__unchanged?"],
    "c_varchar": ["x", "  spaces  "],
    "c_char": ["ab", "      ", "sixsix"],
    "c_name": ["some_name"],
    "c_bytea": ["\\x", "\\x00ff0a0d5c", "\\xdeadbeef"],
    "c_date": ["2026-02-28", "0044-03-15 BC", "infinity", "9999-12-31"],
    "c_time": ["23:59:59.999999", "00:00"],
    "c_timetz": ["12:00:00+05:30", "01:02:03.4-08"],
    "c_ts": ["2026-11-18 02:00:00.123456", "infinity", "1999-12-31 23:59:60"],
    "c_tstz": ["2026-11-18 02:00:00+03", "-infinity", "2026-06-30 23:59:59.5-07", "1800-01-01 00:00:00+01"],
    "c_interval": ["1 year 2 mons -3 days 04:05:06.789", "0", "-1 day"],
    "c_uuid": ["2b1e7a3c-52a1-4f0e-9d38-4f8a5c1d2e3f"],
    "c_json": ['{"b": 1, "a": [1.5, null, "x\\u00e4"]}', '"text"', "1000"],
    "c_jsonb": ['{"b": {"c": []}}', "[]", "12345678901234567", "false"],
    "c_ints": ["{}", "{1,NULL,3}", "{{1,2},{3,4}}"],
    "c_texts": ['{a,"b c","d\\"e",NULL,"NULL",""}', "{}"],
    "c_tstzs": ['{"2026-01-01 00:00:00+01",infinity}'],
    "c_inet": ["192.168.0.1", "2001:db8::1/64"],
    "c_cidr": ["10.0.0.0/8"],
    "c_macaddr": ["08:00:2b:01:02:03"],
    "c_mood": ["sad", "very happy"],
    "c_moods": ['{ok,"very happy"}'],
    "c_range": ["[1,5)", "empty", "(,7]"],
    "c_multi": ["{[1,3),[5,9)}", "{}"],
    "c_domain": ["1", "2147483647"],
    "c_bits": ["101", ""],
    "c_point": ["(1.5,-2)"],
    "c_vector": ["'fat':2 'cat':3A"],
    "c_oid": ["0", "4294967295"],
    "c_pair": ['(1,"a b")', "(,)"],
}  # fmt: skip
assert len(VALUES) >= 25


def check_rebuilt(connection, data_dir, server, tables=("every", "pairs", "docs", "evolving")):
    """Insert the replayed rows into temporary tables, and let PostgreSQL compare them with the originals."""
    replay = Replay(data_dir, server)
    with connection.cursor() as cursor:
        for name in tables:
            rows = list(replay.tables.get(f"public.{name}", {}).values())
            missing, extra = _compare(cursor, name, rows)
            assert not missing, f"{name} lacks {missing}, has {extra}"
            assert not extra, f"{name} has {extra}"
    return replay


def _compare(cursor, name, rows):
    cursor.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod), t.typcategory, a.attgenerated FROM pg_attribute a"
        " JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = %s::regclass AND a.attnum > 0"
        " AND NOT a.attisdropped",
        (f"public.{name}",),
    )
    columns = [(n, kind, category) for n, kind, category, made in cursor.fetchall() if not made]
    quoted = [quote_ident(column, cursor) for column, *_ in columns]
    cursor.execute("DROP TABLE IF EXISTS pg_temp.rebuilt")
    cursor.execute(
        f"CREATE TEMP TABLE rebuilt AS SELECT {', '.join(quoted)} FROM public.{name} WITH NO DATA"
    )
    places = ", ".join(f"%s::{kind}" for _, kind, _ in columns)
    for row in rows:
        assert set(row) == {column for column, *_ in columns}, row
        values = [_literal(row[column], kind, category) for column, kind, category in columns]
        cursor.execute(f"INSERT INTO rebuilt VALUES ({places})", values)
    # As texts: NaN and types without equality (json, point) compare, too.
    shown = ", ".join(
        f"{q}::jsonb::text" if kind == "json" else f"{q}::text"
        for q, (_, kind, _) in zip(quoted, columns, strict=True)
    )
    differences = []
    for first, second in ((f"public.{name}", "rebuilt"), ("rebuilt", f"public.{name}")):
        cursor.execute(f"SELECT {shown} FROM {first} EXCEPT ALL SELECT {shown} FROM {second}")
        differences.append(cursor.fetchall())
    return differences


def _literal(value, kind, category):
    """Return a JSON value of an event as PostgreSQL reads it."""
    if value is None and kind not in {"json", "jsonb"}:
        return None
    if kind == "bytea":
        return b64decode(value)
    if kind in {"json", "jsonb"}:
        return None if value is None else json.dumps(value)
    if category == "A":
        return _array(value)
    return value if isinstance(value, str) else json.dumps(value)


def _array(items):
    parts = []
    for item in items:
        if isinstance(item, list):
            parts.append(_array(item))
        elif item is None:
            parts.append("NULL")
        else:
            text = str(item).replace("\\", "\\\\").replace('"', '\\"')
            parts.append(f'"{text}"')
    return "{" + ",".join(parts) + "}"
