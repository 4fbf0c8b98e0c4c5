"""Commands on tables on disk, from ``embedrock info`` to ``embedrock reshard``."""

from __future__ import annotations

import argparse
import contextlib
import os
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import embedrock as er
from embedrock.cli import exports, imports, merging
from embedrock.cli.forgetting import run_forget
from embedrock.cli.formats import FORMATS, NAMES
from embedrock.cli.formats.base import FLOATS, ROW_NUMBERS
from embedrock.cli.places import check_there, folders_of, opened, place_of, whole_folder
from embedrock.cli.terminal.arguments import add_command, count, file, number, place, print_result
from embedrock.cli.terminal.tables import Field, format_count, format_facts, format_lines, format_number, format_whole
from embedrock.distributed import resharding
from embedrock.distributed.commits import layout_of
from embedrock.distributed.copying import copy_table
from embedrock.distributed.reader import verify_parts
from embedrock.errors import CorruptTableError, did_you_mean, listed
from embedrock.io.vfs import OS_SYSTEM
from embedrock.planner.demand import RULE_NAMES
from embedrock.spec.codecs import CODECS
from embedrock.spec.description import POLICIES, describe_spec
from embedrock.spec.spec import STORAGES
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.reading import check_table
from embedrock.store.table_folder import TableFolder
from embedrock.store.verify import Verification, verify
from embedrock.system.sizes import format_bytes, parse_bytes

RESIDENTS = ("admitted", "pending", "evicted", "forgotten", "gradients_dropped", "gradients_shared", "sketch_error")
DAMAGED = 3  # exit status of `verify` if it found damage
KEEP = 2  # number of commits, the default of tables
MEMORY = "1GiB"  # of RAM, by default


def add_parsers(subparsers: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the commands to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    parser = _add(subparsers, "info", _info, "what a table is: rows, rule, sizes, last commit")
    parser.add_argument("--at", type=_commit, metavar="COMMIT", help="as of this commit (default: the last one)")
    _add(subparsers, "verify", _verify, "check every checksum of every commit; exit status 3 where one does not fit")
    _add(subparsers, "commits", _commits, "the commits that there are")
    parser = _add(subparsers, "rollback", _rollback, "make the content of an earlier commit the newest")
    parser.add_argument("commit", type=_commit, help="its number")
    parser = _add(subparsers, "compact", _compact, "fold the changes of past commits into the base of the table")
    help_text = "newest commits that stay; those with a name do, too (default: 2)"
    parser.add_argument("--keep", type=count, default=KEEP, metavar="N", help=help_text)
    text = "let the commits of this name be dropped; whatever refers to them can no longer be loaded (may be repeated)"
    parser.add_argument("--drop", action="append", default=[], metavar="NAME", help=text)
    _add_memory(parser)
    text = "forget rows, and leave no byte of them in files that no kept commit needs"
    parser = _add(subparsers, "forget", _forget, text)
    parser.add_argument("ids", type=file, metavar="FILE", help="of ids: one in each line, or a .npy file")
    kind = parser.add_mutually_exclusive_group()
    help_text = "FILE has strings, whose ids are those of this er.Vocabulary"
    kind.add_argument("--vocabulary", type=file, metavar="FOLDER", help=help_text)
    kind.add_argument("--hash", action="store_true", help="FILE has strings, whose ids are those of er.hash_ids")
    help_text = "newest commits that stay; those with a name do, too (default: 1)"
    parser.add_argument("--keep", type=count, default=1, metavar="N", help=help_text)
    _add_memory(parser)
    text = "copy the last commit of a table while others train it, by hard links where possible; again: what is new"
    parser = _add(subparsers, "copy", _copy, text)
    parser.add_argument("target", type=place, metavar="DEST", help="a new folder, or an earlier copy of this table")
    _add_export(subparsers)
    _add_import(subparsers)
    _add_reshard(subparsers)


def _add(subparsers: Any, name: str, run: Callable[[Namespace], int], text: str) -> ArgumentParser:
    parser = add_command(subparsers, name, lambda arguments: check_there(arguments.table) or run(arguments), text)
    parser.add_argument("table", type=_table, metavar="TABLE", help="its folder, or FOLDER#NAME of a group's")
    return parser


def _add_export(subparsers: Any) -> None:
    parser = _add(subparsers, "export", _export, "write the rows of a table to a file")
    parser.add_argument("file", type=file, metavar="FILE", help="to write; what it is called says its format")
    parser.add_argument("--at", type=_commit, metavar="COMMIT", help="as of this commit (default: the last one)")
    text = "of the numbers in the file (default: float32); int8, int4: write a table, only to be read, as folder FILE"
    parser.add_argument("--dtype", choices=(*STORAGES, *CODECS), help=text)
    text = "write the published table that TABLE was trained over, with its trained rows, as folder FILE of shards"
    parser.add_argument("--merge", action="store_true", help=text)
    parser.add_argument("--all", action="store_true", help="rows without a record too, with their first values")
    parser.add_argument("--words", metavar="FILE", help="a word per row, for text; '': ids (default: TABLE.words.txt)")
    _add_format(parser, [one.name for one in FORMATS if one.sink is not None])


def _add_import(subparsers: Any) -> None:
    text = "Make a table of a file, or overwrite rows of one. What was cut off is continued by the same command."
    parser = add_command(subparsers, "import", _import, "make a table of a file, or fill one", text)
    parser.add_argument("source", type=file, metavar="FILE", help="to read")
    parser.add_argument("table", type=_table, metavar="TABLE", help="folder of the table")
    parser.add_argument("--into", action="store_true", help="overwrite rows of a table that is there")
    ids = f"name of the array or column of ids, or a .npy file of them; {ROW_NUMBERS}; or, for text, word"
    parser.add_argument("--ids", metavar="NAME", help=ids)
    first = "id of the first row of a file without ids, as of the second shard of a table (default: 0)"
    parser.add_argument("--first-row", type=lambda text: 0 if text == "0" else count(text), metavar="N", help=first)
    text = "words of this vocabulary only, whose ids rows have (default: all words, in a new vocabulary)"
    parser.add_argument("--only-words", type=place, metavar="FOLDER", help=text)
    parser.add_argument("--limit", type=count, metavar="N", help="the first N rows of the file (default: all)")
    parser.add_argument("--vectors", metavar="NAME", help="name of the array or column of vectors")
    parser.add_argument("--dim", type=count, metavar="N", help="numbers in a row, where the file does not say")
    parser.add_argument("--dtype", choices=FLOATS, help="of raw numbers (default: float32)")
    header = "whether the first line of CSV or TSV names the columns (default: as it looks)"
    parser.add_argument("--header", action=BooleanOptionalAction, help=header)
    parser.add_argument("--commit-every", type=count, metavar="N", help="rows (default: 256 MiB of them)")
    _add_format(parser, list(NAMES))
    new = parser.add_argument_group("a new table")
    rows = f"rows of the table, or '{imports.OPEN}' (default: those of the file, or open where it has ids)"
    new.add_argument("--rows", type=imports.rows_or_open, metavar="N", help=rows)
    new.add_argument("--rule", choices=RULE_NAMES, help="(default: none; training sets one)")
    std = "first values of other rows are normal (default: 0, all zero)"
    new.add_argument("--std", type=number, metavar="X", help=std)
    new.add_argument("--table-dtype", choices=STORAGES, help="of the weights (default: float32)")
    text = "vocabulary to make of the words, whose ids rows have (default: TABLE.vocabulary)"
    new.add_argument("--vocabulary", type=place, metavar="FOLDER", help=text)
    new.add_argument("--seed", type=int, metavar="N", help="of first values (default: drawn)")


def _add_reshard(subparsers: Any) -> None:
    text = "share the rows of a table in parts out over another number of processes"
    more = (
        "They go over in batches, with their optimizer state. The parts that there were stay until all new ones are "
        "durable. What was cut off is continued by the same command."
    )
    parser = add_command(subparsers, "reshard", _reshard, text, f"{text[0].upper()}{text[1:]}. {more}")
    parser.add_argument("table", type=place, metavar="TABLE", help="folder that the parts are in")
    parser.add_argument("--shards", type=count, required=True, metavar="N", help="how many parts there are to be")
    text = f"RAM of what is written (default: {resharding.MEMORY})"
    parser.add_argument("--memory", default=resharding.MEMORY, metavar="SIZE", help=text)


def _add_format(parser: ArgumentParser, names: list[str]) -> None:
    parser.add_argument("--format", choices=names, help="of the file (default: what it is called says it)")
    parser.add_argument("--restart", action="store_true", help="begin anew instead of continuing an earlier run")
    _add_memory(parser)


def _add_memory(parser: ArgumentParser) -> None:
    text = f"RAM of the table (default: {MEMORY})"
    parser.add_argument("--memory", type=_size, default=parse_bytes(MEMORY), metavar="SIZE", help=text)


# ---------------------------------------------------------------- read-only commands


def _info(arguments: Namespace) -> int:
    info = None
    while info is None:
        info = _described(arguments.table, arguments.at)
    return print_result(arguments, info, _info_text(info))


def _described(path: str, at: int | None) -> dict[str, Any] | None:
    """Describe a table or group; return None if a writer has dropped the commit meanwhile."""
    with opened(path, or_group=True, mode="r", at=at) as found:
        commits = {one["commit"]: one for one in found.commits()}
        if found.last_commit not in commits:
            return None
        info, stats = {"path": found.path, "uuid": found.uuid}, found.stats()
        if isinstance(found, er.Group):
            info |= {
                "members": found.describe(),
                "rows_touched": int(stats["rows_touched"]),
                "pools": len(found.pools),
            }
        else:
            lifecycle = {name: stats[name] for name in RESIDENTS if name in stats}
            info = describe_spec(found.spec) | lifecycle | info
            info |= {
                "record_bytes": found.spec.record_bytes,
                "rows_touched": stats["rows_touched"],
                "parts": int(stats.get("parts", 1)),
                "steps": found.steps,
                "skipped_steps": stats["skipped_steps"],
            }
        sizes = _bytes_by_kind(place_of(path).folder)
        return info | {"commit": commits[found.last_commit], "commits": len(commits), "bytes": sizes}


def _bytes_by_kind(path: str) -> dict[str, int]:
    kinds: dict[str, int] = defaultdict(int, dict.fromkeys(folders.TABLE.folders, 0))
    for parent, _, names in os.walk(path):
        kind = os.path.relpath(parent, path).split(os.sep)[0]
        for name in names:
            try:
                kinds["other" if kind == "." else kind] += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # a writer has just removed it
                continue
    return dict(kinds)


def _info_text(info: dict[str, Any]) -> str:
    last, kinds = info["commit"], info["bytes"]
    each = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.items())
    files = {
        "commit": _commit_text(last),
        "commits": f"{info['commits']}",
        "on disk": f"{format_bytes(sum(kinds.values()))}: {each}",
    }
    if "members" in info:
        return _group_text(info, files)
    rows = "any int64 as id" if info["rows"] is None else f"{info['rows']:,}"
    facts = {
        "table": info["path"],
        "uuid": info["uuid"],
        "rows": f"{rows}; {info['rows_touched']:,} with records",
        "record": f"{info['record_bytes']} bytes: {format_count(info['dim'], info['dtype'] + ' weight')}, and state",
        "rule": _call(info["rule"]),
        "first values": f"{_call(info['init'])}, seed {info['seed']}",
        **_lifecycle(info),
        **({"parts": f"{info['parts']}, each of which one rank writes"} if info["parts"] > 1 else {}),
        "steps": f"{info['steps']:,}, {info['skipped_steps']:,} skipped",
    }
    return format_facts(facts | files)


MEMBER_FIELDS = (
    Field("table", "name"),
    Field("rows", lambda one: "any int64" if one["rows"] is None else f"{one['rows']:,}"),
    Field("with records", "rows_touched", format_whole),
    Field("dim", "dim"),
    Field("dtype", "dtype"),
    Field("rule", lambda one: _call(one["rule"])),
    Field("steps", "steps", format_whole),
)


def _group_text(info: dict[str, Any], files: dict[str, str]) -> str:
    facts = {
        "group": info["path"],
        "uuid": info["uuid"],
        "tables": f"{len(info['members'])}, in {format_count(info['pools'], 'pool')}",
        "rows": f"{info['rows_touched']:,} with records",
    }
    members = [format_lines(MEMBER_FIELDS, info["members"])] if info["members"] else []
    return "\n\n".join([format_facts(facts | files), *members])


def _lifecycle(info: dict[str, Any]) -> dict[str, str]:
    policies = {name: info[name] for name in POLICIES if name in info}
    ranges = policies.pop("frozen", {}).get("ranges", [])
    frozen = {"frozen": format_count(sum(stop - start for start, stop in ranges), "id")} if ranges else {}
    facts = {name: _call({"name": name.capitalize(), **policy}) for name, policy in policies.items()}
    counts = ", ".join(f"{info[name]:,} {name.replace('_', ' ')}" for name in RESIDENTS[:-1] if info.get(name, -1) >= 0)
    return {**facts, "come and gone": counts, **frozen} if facts else frozen


def _call(described: dict[str, Any] | None) -> str:
    if described is None:
        return "none"
    arguments = ", ".join(f"{key}={value}" for key, value in described.items() if key != "name")
    return f"{described['name']}({arguments})"


def _commits(arguments: Namespace) -> int:
    with er.open(whole_folder(arguments.table, "commits"), mode="r") as table:
        found = table.commits()
    return print_result(arguments, {"commits": found}, format_lines(COMMIT_FIELDS, found))


COMMIT_FIELDS = (
    Field("commit", "commit"),
    Field("time", lambda one: f"{one['time'][:19]}Z"),
    Field("rows", "rows", format_whole),
    Field("size", "bytes", format_bytes),
    Field("step", "step"),
    Field("name", "name", repr),
)


def _commit_text(commit: dict[str, Any]) -> str:
    number, time, _, size, step, name = (field.cell(commit) for field in COMMIT_FIELDS)
    rows = format_count(commit["rows"], "row")
    return ", ".join(filter(None, (number, time, rows, size, step and f"step {step}", name)))


def _verify(arguments: Namespace) -> int:
    folder = os.path.abspath(whole_folder(arguments.table, "verify"))
    for part in folders_of(folder):  # the errors of `er.open`, except for damage
        check_table(OS_SYSTEM, part)
        with contextlib.suppress(CorruptTableError):
            folders.newest(OS_SYSTEM, part)
    verdict = _verdict(folder)
    info = {"path": folder, **verdict._asdict()}
    good = "there is no good commit" if verdict.newest_good is None else f"newest good commit: {verdict.newest_good}"
    seen = f"{format_count(verdict.files, 'file')}, {format_count(verdict.records, 'record')}"
    whole = f"all good, up to commit {verdict.newest_good}"
    summary = f"{seen}: " + (f"{format_count(len(verdict.problems), 'problem')}; {good}" if verdict.problems else whole)
    left = format_count(len(verdict.strange), "file")
    strange = [f"{left} that no commit names, left alone in case they are somebody's:"]
    more = [*strange, *verdict.strange] if verdict.strange else []
    print_result(arguments, info, "\n".join([*verdict.problems, summary, *more]))
    return DAMAGED if verdict.problems else 0


def _verdict(folder: str) -> Verification:
    layout = layout_of(folder)
    while True:
        before = _numbers(folder)
        verdict = verify(OS_SYSTEM, folder) if layout is None else verify_parts(layout)
        # A writer may have dropped commits, and their files, meanwhile.
        if not verdict.problems or before <= _numbers(folder):
            return verdict


def _numbers(folder: str) -> set[tuple[str, int]]:
    return {(part, number) for part in folders_of(folder) for number in manifests.numbers(OS_SYSTEM, part)}


# ---------------------------------------------------------------- commands that change tables


def _rollback(arguments: Namespace) -> int:
    try:
        with er.open(whole_folder(arguments.table, "rollback")) as table:
            made = table.rollback(arguments.commit)
            if table.uncommitted:  # for a mirror elsewhere
                made = table.commit(step=table.last_step)
    except CorruptTableError:
        made = _rescue(os.path.abspath(arguments.table), arguments.commit)
    info = {"commit": made, "content_of": arguments.commit}
    return print_result(arguments, info, f"commit {made} has the content of commit {arguments.commit}")


def _rescue(folder: str, commit: int) -> int:
    """Roll back although the last commit is too damaged to open."""
    held = folders.lock(OS_SYSTEM, folder, locked=True)
    try:
        target = folders.manifest_at(OS_SYSTEM, folder, commit)
        TableFolder(OS_SYSTEM, folder, target, None).close()  # checks that the commit can be opened
        last, forgotten = manifests.numbers(OS_SYSTEM, folder)[-1], folders.newest_readable(OS_SYSTEM, folder).forgotten
        made = replace(target, commit=last + 1, parent=last, name=None, time=publishing.now())
        made = replace(made, origin=target.content_commit, forgotten=forgotten)
        manifests.publish(OS_SYSTEM, folder, made)
        return made.commit
    finally:
        folders.unlock(OS_SYSTEM, held)


def _compact(arguments: Namespace) -> int:
    folder = whole_folder(arguments.table, "compact")
    before = sum(_bytes_by_kind(folder).values())
    with er.open(folder, memory=arguments.memory, keep=arguments.keep) as table:
        known = {one["name"] for one in table.commits()} - {None}
        if unknown := [name for name in arguments.drop if name not in known]:
            has = f"it has {listed(sorted(known))}" if known else "none has a name"
            raise er.ArgumentError(f"{folder} has no commit {unknown[0]!r}: {has}.{did_you_mean(unknown[0], known)}")
        for name in arguments.drop:
            table.release(name)
        if table.stats().get("rows_withheld"):  # files have the rows until a commit records their deletion
            table.commit(step=table.last_step)
        commit = table.compact()
    after = sum(_bytes_by_kind(folder).values())
    info = {"commit": commit, "bytes_before": before, "bytes": after}
    return print_result(arguments, info, f"commit {commit}: {format_bytes(before)} before, {format_bytes(after)} now")


def _forget(arguments: Namespace) -> int:
    parts = folders_of(place_of(arguments.table).folder)
    before = sum(sum(_bytes_by_kind(part).values()) for part in parts)
    info = run_forget(arguments)
    info |= {"bytes_before": before, "bytes": sum(sum(_bytes_by_kind(part).values()) for part in parts)}
    rows, ids = format_count(info["forgotten"], "row"), format_count(info["ids"], "id")
    sizes = f"{format_bytes(info['bytes_before'])} before, {format_bytes(info['bytes'])} now"
    if info["unknown"]:
        ids += f" ({format_count(info['unknown'], 'string')} not in the vocabulary)"
    text = f"{rows} of {ids} forgotten, commit {info['commit']}: {sizes}"
    if info["kept_commits"]:
        kept = ((one["commit"], one["name"]) for one in info["kept_commits"])
        names = [f"{number} ({name!r})" if name else f"{number}" for number, name in kept]
        text += f"\nolder commits have forgotten rows in their files still, and do not show them: {', '.join(names)}"
        text += "\nto drop these commits, and the checkpoints that refer to them:"
        text += "".join(f"\n  {command}" for command in info["remove"])
    return print_result(arguments, info, text)


def _copy(arguments: Namespace) -> int:
    info = copy_table(os.path.abspath(whole_folder(arguments.table, "copy")), os.path.abspath(arguments.target))
    files = f"{format_count(info['linked'], 'file')} linked, {info['written']} written ({format_bytes(info['bytes'])})"
    text = f"commit {info['commit']}: {files}, {info['there']} there before"
    text += "\nrows that the table forgets from now on stay in this copy until you copy again"
    return print_result(arguments, info, text)


def _reshard(arguments: Namespace) -> int:
    done = resharding.reshard(arguments.table, arguments.shards, parse_bytes(arguments.memory, "--memory"))
    parts = f"{format_count(done.before, 'part')} before, {done.after} now"
    at = "" if done.step is None else f", as of step {done.step}"
    text = f"{arguments.table}: {parts}; {format_count(done.rows, 'row')} with records{at}"
    return print_result(arguments, done._asdict(), text)


def _export(arguments: Namespace) -> int:
    given = [name for name in ("all", "dtype", "format", "words") if getattr(arguments, name) not in (None, False)]
    if arguments.merge and given:
        arguments.parser.error(f"--merge writes shards in the form that they have: leave --{given[0]} out")
    info = merging.run_merge(arguments) if arguments.merge else exports.run_export(arguments)
    which = "all, in order" if info["all"] else "those with records"
    rows = f"{format_count(info['rows'], 'row')} ({which}), {info['dim']} dim"
    text = f"{rows}, of commit {info['commit']}: {', '.join(info['files'])}"
    return print_result(arguments, info, text + _continued(info))


def _import(arguments: Namespace) -> int:
    given = [name for name in imports.NEW_TABLE if getattr(arguments, name) is not None]
    if arguments.into and given:
        arguments.parser.error(f"--into takes a table as it is: leave --{given[0].replace('_', '-')} out")
    if arguments.only_words and arguments.vocabulary:
        arguments.parser.error("--only-words gives rows the ids of a vocabulary that is there: leave --vocabulary out")
    if arguments.into:
        check_there(arguments.table)
    info = imports.run_import(arguments)
    text = f"{_rate_text(info)}: {info['table']}, commit {info['commit']} ({info['format']})"
    if info["words"]:
        text += f"; words: {info['words']}"
    if info["vocabulary"]:
        text += f"; vocabulary: {info['vocabulary']}"
    if info["found"] is not None:
        text += f"; vectors of {info['found']:,} of its {format_count(info['strings'], 'word')}"
    if info["repeated"]:
        noun = "word" if info["vocabulary"] else "id"
        text += f"; {format_count(info['repeated'], noun)} came again: the last vector of each holds"
    return print_result(arguments, info, text + _continued(info))


def _rate_text(info: dict[str, Any]) -> str:
    """Describe the number and rate of imported rows: rows of this run, and their part of the file."""
    seconds, rows = max(info["seconds"], 1e-9), info["rows"] - info["continued_at"]
    megabytes = info["bytes"] * rows / info["rows"] / 1e6
    took = f"{format_number(seconds)} s, {rows / seconds:,.0f} rows/s, {format_number(megabytes / seconds)} MB/s"
    return f"{format_count(info['rows'], 'row')}, {info['dim']} dim, {took}"


def _continued(info: dict[str, Any]) -> str:
    return f" (continued at row {info['continued_at']:,})" if info["continued_at"] else ""


# ---------------------------------------------------------------- options


def _table(text: str) -> str:
    try:
        OS_SYSTEM.check_usable("a table")
    except er.UnsupportedError as error:
        raise ArgumentTypeError(str(error)) from None
    return place(text)


def _commit(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise ArgumentTypeError(f"must be the number of a commit: got {text!r}")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text, "--memory")
    except er.ArgumentError as error:
        raise ArgumentTypeError(str(error)) from error
