"""What the commands that judge a workload or a record have in common: thresholds from `--set`, and how they are said back.

Never reads a settings file: who wants one in effect passes its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import Exit, cell, fail

if TYPE_CHECKING:
    from fluidpd.policy.settings import PolicySettings

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a policy setting of docs/configuration.md, without `policy.`; repeat it"),
]


def with_settings(base: PolicySettings, pairs: Sequence[str]) -> PolicySettings:
    """`base` with every KEY=VALUE of `pairs`. Exits with a sentence that names the key and what is allowed."""
    from controller.settings_source import ConfigError, overridden

    words: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            fail(f"--set {pair}: write KEY=VALUE, such as --set prefill_high=1.5", Exit.USAGE)
        words[key.strip().removeprefix("policy.")] = value.strip()
    try:
        return overridden(base, words)
    except ConfigError as problem:
        fail(f"--set: {str(problem).replace('the command line: ', '')}", Exit.USAGE)


def changed(base: PolicySettings, other: PolicySettings) -> dict[str, tuple[object, object]]:
    """The settings in which they differ: name -> (base's, other's)."""
    before, after = base.model_dump(), other.model_dump()
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def said(base: PolicySettings, other: PolicySettings) -> str:
    """The differences as a person reads them; nothing if there are none."""
    return ", ".join(f"{name} {cell(was)} -> {cell(now)}" for name, (was, now) in changed(base, other).items())
