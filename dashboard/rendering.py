"""Turns a view dataclass into HTML: the template named on the view gets exactly its fields.

Never escapes by hand: autoescape is on, an undefined name is an error, and only templates make markup.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dashboard import format as fmt
from dashboard import visitor


class View(Protocol):
    """A frozen dataclass with the name of its template."""

    template: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]


def time_element(wall_s: float, text: str | None = None) -> Markup:
    iso = fmt.iso(wall_s)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(iso, iso, text or fmt.when(wall_s))


def role_badge(role: str) -> Markup:
    return Markup('<span class="role role-{0}" title="{0}">{1}</span>').format(role, role[:1].upper())


def percent(share: float) -> str:
    return f"{share * 100:.3f}%"


def user_text(value: object) -> Markup:
    """Text a person or a worker chose: isolated, so that its direction marks cannot reorder the page around it."""
    return Markup("<bdi>") + escape(value) + Markup("</bdi>")


def make_environment() -> Environment:
    env = Environment(
        loader=PackageLoader("dashboard", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        time=time_element,
        role=role_badge,
        pct=percent,
        user=user_text,
        seconds=fmt.seconds,
        share=fmt.share,
        quantity=fmt.quantity,
        iso=fmt.iso,
        minute=fmt.minute,
    )
    env.globals["visitor"] = visitor.current
    return env


ENVIRONMENT = make_environment()


def context_of(view: View) -> dict[str, Any]:
    return {f.name: getattr(view, f.name) for f in fields(view)}


def render(view: View) -> Markup:
    return Markup(ENVIRONMENT.get_template(view.template).render(context_of(view)))  # noqa: S704 - autoescaped by Jinja
