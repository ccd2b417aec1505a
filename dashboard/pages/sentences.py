"""Sentences for decisions and refusals, from their enums and numbers.

Never adds a judgement that the record does not carry.
"""

from __future__ import annotations

from collections.abc import Mapping

from dashboard import format as fmt
from fluidpd.names import Action
from fluidpd.record import DecisionRow


def decision_words(row: DecisionRow) -> str:
    """What was decided, and why, in a sentence."""
    why = fmt.reason_words(row.reason)
    did = _deed(row)
    if not did:
        return f"No change: {why}."
    return f"Would {did} (advisory: nothing sent): {why}." if row.would_have else f"{fmt.capitalised(did)}: {why}."


def decision_mark(row: DecisionRow) -> str:
    """The few letters beside its mark in the chart."""
    if row.flips:
        return f"flip {row.flips[0].get('worker', '')}" + (f" +{len(row.flips) - 1}" if len(row.flips) > 1 else "")
    return {Action.BORROW: "lend", Action.REVOKE: "revoke", Action.SHED: "shed"}.get(_action(row.action), "stay")


def is_deed(row: DecisionRow) -> bool:
    return _action(row.action) is not Action.HOLD


def refusal_words(refusal: Mapping[str, object]) -> str:
    """w3 was not moved: it has not been in its role long enough (in role 3.1 s, residence 5 s)."""
    numbers = refusal.get("numbers")
    detail = str(refusal.get("detail") or "")
    shown = fmt.numbers_line(numbers) if isinstance(numbers, Mapping) and numbers else detail
    worker = str(refusal.get("worker") or "No worker")
    return f"{worker}: {fmt.rule_words(str(refusal.get('rule', '')))}{f' ({shown})' if shown else ''}."


def _action(action: str) -> Action:
    return Action(action) if action in Action.__members__.values() else Action.HOLD


def _deed(row: DecisionRow) -> str:
    if row.flips:
        return "move " + fmt.listed([f"{f.get('worker', '?')} to {f.get('to', '?')}" for f in row.flips])
    match _action(row.action):
        case Action.BORROW:
            return "lend prefill from " + fmt.listed(list(row.lenders)) if row.lenders else "lend prefill"
        case Action.REVOKE:
            return "stop lending"
        case Action.SHED:
            return "shed load"
        case Action.FLIP:
            return "move a worker"
        case Action.HOLD:
            return ""
