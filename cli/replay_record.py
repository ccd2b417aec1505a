"""`fluidpd replay` on a controller's database: every stored snapshot judged again, and what differs printed.

Never writes, and never calls what it found a prediction: only a trace can be played to another end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.judged import said, with_settings
from cli.output import Exit, emit_json, emit_table, fail, moment, say, span
from cli.progress import bars
from fluidpd.shares import percent

if TYPE_CHECKING:
    from controller.store.queries import Queries
    from fluidpd.cost import CostModel
    from fluidpd.record import BasisRow, Scope
    from fluidpd.simulator.rejudge import Difference, Rejudge, Side, Terms, Told

UNKNOWABLE = (
    "What this cannot know: the record goes on as the fleet really went on. From the first different act on, the other side "
    "judges a fleet that it would not have had; its moves and grants change nothing here, so it may ask for the same again. The "
    "record has one look a second where the controller had many, so what must hold for a time is judged late by up to a second. "
    "What users would have got cannot be told from a record: replay a trace for that."
)


async def replay_record(
    url: str | None,
    config: Path | None,
    policy: str | None,
    pairs: Sequence[str],
    *,
    last_s: float | None,
    limit: int,
    as_json: bool,
) -> None:
    from controller.store.engine import StoreUnavailable, make_engine, sqlite_path
    from controller.store.queries import Queries

    try:
        url, own = _where(url, config)
        path = sqlite_path(url)
        if path is not None and not path.exists():
            fail(f"there is no database {path}: check --from, or --config", Exit.USAGE)
        engine = make_engine(url, read_only=True)
        try:
            queries = Queries(engine, await _scope(Queries(engine), own))
            terms, notes = _terms(await queries.bases(), policy, pairs)
            found, attained = await _judge(queries, terms, last_s, quiet=as_json)
            await _show(found, terms, attained, notes, limit=limit, as_json=as_json)
        finally:
            await engine.dispose()
    except StoreUnavailable as problem:
        fail(f"replay: {problem}", Exit.UNAVAILABLE)


def _where(url: str | None, config: Path | None) -> tuple[str, Scope]:
    """The database to read, and whose rows the controller's settings would have written."""
    import os

    from cli.serving import settings_or_exit
    from controller.settings import load_settings
    from controller.store.engine import address

    settings = settings_or_exit(lambda: load_settings(config, os.environ, {}), "replay")
    return url or address(settings.database.url, settings.database.password_file), settings.identity.scope


async def _scope(queries: Queries, own: Scope) -> Scope:
    there = await queries.recorded_scopes()
    if not there:
        fail("replay: the database holds no snapshots: a controller records them while retention.snapshots_days > 0", Exit.USAGE)
    if own in there:
        return own
    if len(there) > 1:
        names = "; ".join(f"{s.cluster}/{s.model}/{s.pool}" for s in there)
        fail(f"replay: the database holds several fleets ({names}): set FLUIDPD_IDENTITY__CLUSTER, __MODEL, __POOL", Exit.USAGE)
    return there[0]


def _terms(
    bases: Sequence[BasisRow], policy: str | None, pairs: Sequence[str]
) -> tuple[dict[str, tuple[Terms, Terms]], list[str]]:
    """Both sides for every basis, newest first; and what is to be said about them."""
    from pydantic import ValidationError

    from controller.recorder import fingerprint
    from fluidpd.policy.settings import PolicySettings
    from fluidpd.simulator.rejudge import CannotJudge, terms_of
    from fluidpd.slo import SloTargets

    found: dict[str, tuple[Terms, Terms]] = {}
    notes: list[str] = []
    for basis in bases:
        at = moment(basis.wall_s)
        try:
            stood, slo = PolicySettings.model_validate(dict(basis.policy)), SloTargets.model_validate(dict(basis.slo))
        except ValidationError as problem:
            notes.append(f"settings of {at} are another version's and were left out: {problem.errors()[0]['msg']}")
            continue
        cost = _cost(basis)
        if fingerprint(cost) != basis.cost.get("fingerprint"):
            notes.append(f"the cost model {cost.key} is not the one of {at}: pressures differ from what was seen")
        try:
            mine = with_settings(stood, pairs)
            sides = terms_of(stood.judge, stood, slo, cost), terms_of(policy or mine.judge, mine, slo, cost)
        except CannotJudge as problem:
            fail(f"--policy {problem}", Exit.USAGE)
        except ValueError as problem:
            fail(f"--policy: {problem}", Exit.USAGE)
        found[basis.id] = sides
    return found, notes


def _cost(basis: BasisRow) -> CostModel:
    from fluidpd.cost import parse_cost_table

    key, file = str(basis.cost.get("key")), basis.cost.get("file")
    try:
        text = Path(str(file)).read_text() if file else files("config").joinpath("costs/h100_h200.json").read_text()
        return parse_cost_table(text, key)
    except OSError as problem:
        fail(f"replay: the record was made with the cost table {file}, which cannot be read ({problem.strerror})", Exit.FAILURE)
    except (KeyError, ValueError) as problem:
        fail(f"replay: cost table {file or 'of FluidPD'}: {problem.args[0]}", Exit.FAILURE)


async def _judge(
    queries: Queries, terms: Mapping[str, tuple[Terms, Terms]], last_s: float | None, *, quiet: bool
) -> tuple[Rejudge, tuple[float, float] | None]:
    """All snapshots in order, a few hundred at a time; and how many requests were good, of how many, meanwhile."""
    from controller.store.alert_queries import AlertQueries
    from fluidpd.simulator.rejudge import Rejudge

    until = time.time()
    since = until - last_s if last_s is not None else 0.0
    found = Rejudge(terms)
    with bars(quiet=quiet) as progress:
        rows = await queries.snapshots(since, until)
        began = rows[0].second if rows else since
        step = progress.bar("judging again", until - began)
        while rows:
            for row in rows:
                found.look(row)
            if step is not None:
                step(rows[-1].second - began)
            rows = await queries.snapshots(rows[-1].second + 1, until)
    if found.first_second is None or found.last_second is None:
        return found, None
    good, total = await AlertQueries(queries).judged("joint", found.first_second // 60 * 60, found.last_second)
    return found, (good, total) if total else None


async def _show(
    found: Rejudge,
    terms: Mapping[str, tuple[Terms, Terms]],
    attained: tuple[float, float] | None,
    notes: Sequence[str],
    *,
    limit: int,
    as_json: bool,
) -> None:
    if not found.judged:
        fail("replay: no snapshot could be judged: none is that new, or none has settings that this version knows", Exit.FAILURE)
    a, b = next(iter(terms.values()))
    if as_json:
        emit_json(document(found, a, b, attained, notes))
        return
    first, last = found.first_second, found.last_second
    assert first is not None and last is not None
    for note in notes:
        say(f"fluidpd: {note}")
    print(f"record: {moment(first)} to {moment(last)}, {found.judged} snapshots, {found.gaps} restarts or gaps")
    alike = found.as_recorded / found.judged
    print(f"then:   {a.name}, as the settings stood; judged again it says what was recorded in {percent(alike)}")
    print(f"now:    {b.name}{': ' + changed if (changed := said(a.policy, b.policy)) else ''}")
    if attained is not None:
        print(f"users:  {percent(attained[0] / attained[1])} of {attained[1]:.0f} requests met both targets, as recorded")
    print()
    emit_table(totals(found), ("side", "flips_decided", "flip_wishes", "lending_s", "lent_worker_s", "reasons"))
    print()
    _show_differences(found, limit)
    print()
    print(UNKNOWABLE)


def _show_differences(found: Rejudge, limit: int) -> None:
    acts, words = found.differing_s(acts=True), found.differing_s(acts=False)
    if not found.differences:
        print("They decide alike in every second.")
        return
    print(f"They act differently in {acts} s and give another reason for the same in {words} s.")
    if found.first_act is not None:
        print(f"First different act: {moment(found.first_act.since)}.")
        share, other = found.differing.share, found.calm.share
        if share is not None:
            rest = "" if other is None else f" (elsewhere {percent(other)})"
            late = f"{percent(share)} were predicted to miss their first token{rest}"
            print(f"Of the prompts seen waiting in those seconds, {late}.")
    acting = [d for d in found.differences if d.is_act] or found.differences
    emit_table(
        [_line(d) for d in acting[:limit]],
        ("at", "for", "ppi", "dpi", "then", "now"),
    )
    if len(acting) > limit:
        print(f"... and {len(acting) - limit} more: --limit, or --json for all")


def _line(d: Difference) -> dict[str, Any]:
    lasted = span(float(d.until - d.since + 1))
    return {"at": moment(d.since), "for": lasted, "ppi": d.ppi, "dpi": d.dpi, "then": _act(d.a), "now": _act(d.b)}


def _act(told: Told) -> str:
    moves = " ".join(f"{f['worker']}:{f['from']}->{f['to']}" for f in told.flips)
    lent = f"lenders {','.join(told.lenders)}" if told.lenders else ""
    return "; ".join(part for part in (told.reason, moves, lent) if part)


def totals(found: Rejudge) -> list[dict[str, Any]]:
    def row(name: str, side: Side) -> dict[str, Any]:
        often = sorted(side.seconds.items(), key=lambda item: -item[1])
        return {
            "side": name,
            "flips_decided": len(side.flips),
            "flip_wishes": side.spells,
            "lending_s": side.lending_s,
            "lent_worker_s": side.lent_worker_s,
            "reasons": " ".join(f"{reason}={seconds}s" for (_, reason), seconds in often[:4]),
        }

    return [row("recorded", found.recorded), row("then", found.a), row("now", found.b)]


def document(found: Rejudge, a: Terms, b: Terms, attained: tuple[float, float] | None, notes: Sequence[str]) -> dict[str, Any]:
    def side(terms: Terms, of: Side) -> dict[str, Any]:
        return {
            "policy": terms.name,
            "settings": terms.policy.model_dump(mode="json"),
            "reasons_s": {reason: seconds for (_, reason), seconds in of.seconds.items()},
            "flips": [{"second": at, **flip, "reason": reason} for at, flip, reason in of.flips],
            "flip_wishes": of.spells,
            "lending_s": of.lending_s,
            "lent_worker_s": of.lent_worker_s,
        }

    def told(t: Told) -> dict[str, Any]:
        return {"action": t.action, "reason": t.reason, "flips": t.flips, "lenders": t.lenders, "numbers": dict(t.numbers)}

    return {
        "engine": "recorded",
        "from_s": found.first_second,
        "to_s": found.last_second,
        "snapshots": found.judged,
        "not_judged": found.unjudged,
        "gaps": found.gaps,
        "as_recorded": found.as_recorded / found.judged,
        "recorded_attainment": attained[0] / attained[1] if attained else None,
        "then": side(a, found.a),
        "now": side(b, found.b),
        "acts_differ_s": found.differing_s(acts=True),
        "reasons_differ_s": found.differing_s(acts=False),
        "first_different_act": found.first_act.since if found.first_act else None,
        "predicted_late": {"where_acts_differ": found.differing.share, "elsewhere": found.calm.share},
        "differences": [
            {"since": d.since, "until": d.until, "ppi": d.ppi, "dpi": d.dpi, "then": told(d.a), "now": told(d.b), "act": d.is_act}
            for d in found.differences
        ],
        "notes": list(notes),
        "cannot_know": UNKNOWABLE,
    }
