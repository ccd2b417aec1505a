"""docs/protocol.md is kept true: every message type has an example line, and each example is a real message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from fluidpd.names import Answer
from sidecar import protocol
from sidecar.protocol import FROM_PLUGIN, TO_PLUGIN, FromPlugin, Order, ToPlugin


def examples(root: Path) -> list[tuple[Any, str]]:
    text = (root / "docs" / "protocol.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    return [(adapter, one) for adapter, block in zip((FROM_PLUGIN, TO_PLUGIN), blocks, strict=True) for one in block.splitlines()]


def types_of(union: Any) -> set[str]:
    return {model.model_fields["type"].default for model in get_args(get_args(union)[0])}


def test_every_example_line_is_a_message_and_names_no_unknown_field(root: Path) -> None:
    for adapter, one in examples(root):
        message = adapter.validate_json(one)
        assert set(json.loads(one)) <= set(type(message).model_fields), one


@pytest.mark.parametrize(("adapter", "union"), [(FROM_PLUGIN, FromPlugin), (TO_PLUGIN, ToPlugin)])
def test_every_message_type_has_an_example(root: Path, adapter: Any, union: Any) -> None:
    shown = {json.loads(one)["type"] for where, one in examples(root) if where is adapter}
    assert shown == types_of(union)


def test_every_capability_every_order_and_every_answer_is_explained(root: Path) -> None:
    text = (root / "docs" / "protocol.md").read_text(encoding="utf-8")
    capabilities = {value for name, value in vars(protocol).items() if name.startswith("CAN_")}
    for word in capabilities | set(get_args(Order.model_fields["what"].annotation)) | set(Answer) - {Answer.REPLAY}:
        assert f"`{word}`" in text, word
